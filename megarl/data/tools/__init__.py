"""Tools and tool calls: schemas, records of data, and the formats of chat templates."""
