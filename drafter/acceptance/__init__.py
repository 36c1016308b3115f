"""Stage 06: measures drafters' acceptance lengths and recommends one."""
