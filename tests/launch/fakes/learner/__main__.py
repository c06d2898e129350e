from scripted import play

play("learner")
