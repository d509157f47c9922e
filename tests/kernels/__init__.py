"""Each op against its reference, each reference against an independent formula."""
