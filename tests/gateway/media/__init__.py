"""Tests of images and videos before they reach the engine."""
