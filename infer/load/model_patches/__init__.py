"""Changes to a loaded model by what it holds, of whatever family: experts, computed positions, a language tower."""
