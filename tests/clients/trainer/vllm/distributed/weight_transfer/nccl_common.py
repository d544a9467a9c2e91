trainer_init = None
