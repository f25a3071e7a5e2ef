"""One job: an experiment with its identity, files, locks and record in the tracker."""
