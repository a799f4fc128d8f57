"""Networks that give an image its semantic and its uncertainty embedding."""

from idml.model.model import BatchRows, Model, ModelConfig, build_model, fingerprint, load_model, save_model

__all__ = ["BatchRows", "Model", "ModelConfig", "build_model", "fingerprint", "load_model", "save_model"]
