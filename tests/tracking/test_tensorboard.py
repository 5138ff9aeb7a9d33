"""TensorBoard event files hold the metrics that were logged."""

import math

from verl.component import BuildContext
from verl.tracking.base import Trackers
from verl.tracking.tensorboard import TensorBoard


def test_the_event_file_gives_back_metrics_config_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    running = Trackers(tensorboard=TensorBoard()).build(BuildContext())
    running.start("run", {"actor": {"lr": 0.5}, "api_key": "abc"}, tmp_path, 3)
    for step in (1, 2, 3):
        running.log({"reward/mean": step / 4, "actor/loss": math.nan}, step)
    running.evaluation({"eval/accuracy": 0.75}, 3)
    running.samples([{"prompt": "1+1=", "response": "2"}], 3, "eval")
    running.close()
    running.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert math.isnan(events.Scalars("actor/loss")[0].value)
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(3, 0.75)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert '"lr": 0.5' in texts["config/text_summary"]
    assert "abc" not in texts["config/text_summary"]
    assert '"response": "2"' in texts["samples/eval/text_summary"]
