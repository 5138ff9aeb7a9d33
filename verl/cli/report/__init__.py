"""The page of a run, and of several: curves, samples, tokens and statistics from the files of their directories.

card        The model card of an exported model, and its upload to the Hugging Face hub
command     `verl report`: one HTML page of a run, or of several to compare them
diagnosis   Metrics that left their usual range, in words, with the threshold
page        The HTML page and the JSON in it; its style and script are `page.css` and `page.js`
read        A run, read from the files of its directory alone, and of the directories that it was resumed from
samples     Rows of sample tables and of replay buffers
statistics  Intervals of the difference of two evaluations, and over seeds
tracker     Tracker that writes `report.html` when a run ends
watch       `verl watch`: a run as it goes, in the terminal or as its page in a browser
"""
