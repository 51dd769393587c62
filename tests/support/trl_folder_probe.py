"""Run in an exported folder by a Python that sees nothing of ours: what its rows and rewards are, as JSON."""

import json
import sys

sys.path.insert(0, sys.argv[1])

import dataset
import rewards

dataset.prepare()
files = {file.stem: file for file in (dataset.TRAIN, dataset.VALIDATION, dataset.TEST)} | dataset.evaluation_sets()
rows = {name: [json.loads(line) for line in file.open()] if file.is_file() else [] for name, file in files.items()}
texts = json.load(sys.stdin)
problem = rows["train"][0]
columns = {"prompts": "prompt", "row": "row", "answer": "answer"}
given = {name: [problem[column]] * len(texts) for name, column in columns.items()}
given |= {"completions": [[{"role": "assistant", "content": text}] for text in texts]}
given |= dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
scores = {function.__name__: function(**given) for function in rewards.FUNCTIONS}
ours = {name: getattr(x, "__file__", "") or "" for name, x in sys.modules.items() if name.split(".")[0] == "backend"}
names = [name for name in vars(rewards) if name in scores]
print(json.dumps({"rows": rows, "scores": scores, "names": names, "ours": ours}))
