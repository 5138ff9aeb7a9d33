def variety(prompts, responses):
    return [len(set(response)) for response in responses]
