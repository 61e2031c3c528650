"""The page of a comparison, piece by piece: what was handed over (`data`), how it is drawn (`canvas`), each section."""
