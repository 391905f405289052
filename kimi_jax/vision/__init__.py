"""Images and frames of videos in prompts: preprocessing, the tower MoonViT and its projector."""
