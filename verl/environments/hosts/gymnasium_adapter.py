"""Adapter from a gymnasium environment to text observations and actions. Runs in any interpreter that has
gymnasium."""

import re

import gymnasium


class Text:
    """Observations are converted to text; an action is the text itself, or the first whole number in it."""

    def __init__(self, env_id, **arguments):
        self.env = gymnasium.make(env_id, **arguments)
        self.is_text = isinstance(self.env.action_space, gymnasium.spaces.Text)
        if not self.is_text and not isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            raise TypeError(f"{env_id} has actions {self.env.action_space}: expected Discrete or Text")

    def reset(self, row, seed):
        observation, _ = self.env.reset(seed=int(seed) % 2**31)
        return self._shown(observation)

    def step(self, action):
        chosen = action.text.strip()
        if not self.is_text:
            number = re.search(r"-?\d{1,18}", chosen)
            chosen = None if number is None else int(number[0])
            if chosen is None or not self.env.action_space.contains(chosen):
                return f"error: expected an action of {self.env.action_space}\n", 0.0, False, False, {}
        observation, reward, terminated, truncated, _ = self.env.step(chosen)
        return self._shown(observation), reward, terminated, truncated, {}

    def close(self):
        self.env.close()

    def _shown(self, observation):
        rendered = self.env.render() if self.env.render_mode == "ansi" else observation
        return f"{rendered}\n"
