"""From files to items: captioned pictures, prompt lists, and streams of items keyed by global position."""
