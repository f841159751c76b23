"""What a stored tensor is: files of safetensors, torch and DCP, and the fields of PEFT. Without torch."""
