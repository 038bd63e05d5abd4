"""The backward pass: gradients by row, kept or limited, losses that are scaled, and passes that are left out."""
