"""One trial: real processes that train one setting with one seed under DDP, and meter every byte and second of it.
It knows nothing of a search: a trial goes in as `settings.Trial`, an outcome comes out."""
