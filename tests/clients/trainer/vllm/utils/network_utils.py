get_ip = get_open_port = None
