from scripted import option, play

play(f"env-{option('--domain')}-{option('--replica')}")
