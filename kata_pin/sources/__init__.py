"""Where facts about containers and threads come from."""
