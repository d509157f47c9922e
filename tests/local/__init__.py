"""Tests of the local cluster, the package and what is deployed."""
