"""What a job needs around its engines: ranks that end together, engines in child processes, folders of its own. No engine and no arithmetic lives here."""
