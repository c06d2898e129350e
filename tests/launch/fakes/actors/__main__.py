from scripted import option, play

play(f"actor-{option('--index')}")
