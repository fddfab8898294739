"""Pure tables that every layer may read: chunk bounds, step tables, codec sizes, block specs.

No arrays, no messages, no config. The executor in `comm` runs these tables, `cost` prices them,
`plan` and `report` quote them: one table, so a measured byte and a predicted byte cannot drift.
"""
