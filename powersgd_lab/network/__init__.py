"""What a network makes of a hook's bytes: links by name, and the time that an all-reduce takes on one.
Kept apart from what is trained, because accuracy does not depend on the network and time does."""
