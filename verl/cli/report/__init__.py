"""The page of a run, and of several: curves, samples, tokens and statistics from the files of their directories.

page        The HTML page and the JSON in it; its style and script are `page.css` and `page.js`
read        A run, read from the files of its directories alone; metrics that left their usual range
tracker     Tracker that writes `report.html` when a run ends
watch       `verl watch`: a run as it goes, in the terminal or as its page in a browser; `verl report`
"""
