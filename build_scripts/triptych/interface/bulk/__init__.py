"""A file of rows through a served pipeline: its formats, its parts on the disk, its run."""
