from scripted import play

play("engine-0")
