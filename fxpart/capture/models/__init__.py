"""Describe models by name (`spec`, without torch) and build them (`build`)."""
