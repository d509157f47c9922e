"""`triptych top`: what a cluster does right now, from the metrics of its processes.

    /metrics of every process ──scrape──▶ Scrape ──overview(before, after)──▶ Overview ──▶ tables, JSON

command     the options, and the loop
tables      what a person reads
overview    two scrapes to rates, shares and medians
scrape      the metrics of a process at one moment
"""
