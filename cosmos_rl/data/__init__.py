"""From files to items: captioned images, prompt lists, and streams of items keyed by global position."""
