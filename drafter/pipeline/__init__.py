"""All stages of a night in order, with the servers they need; the plan before it, the report after it."""
