"""What the command line can do, one file a job. Nobody imports this room."""
