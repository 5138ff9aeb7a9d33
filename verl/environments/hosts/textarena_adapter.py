"""A game of textarena for one player. Runs in any interpreter that has textarena."""

import textarena


class Game:
    """The first observation is the game's rules; the reward comes when it is over."""

    def __init__(self, env_id, **arguments):
        self.env = textarena.make(env_id, **arguments)

    def reset(self, row, seed):
        self.env.reset(num_players=1, seed=int(seed) % 2**31)
        return self._seen()

    def step(self, action):
        done, _ = self.env.step(action=action.text)
        if not done:
            return self._seen(), 0.0, False, False, {}
        rewards, _ = self.env.close()
        return None, float(rewards[0]), True, False, {}

    def _seen(self):
        _, observation = self.env.get_observation()
        return observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
