"""How the updates of a step become one: their mean, and merges that resist attackers."""
