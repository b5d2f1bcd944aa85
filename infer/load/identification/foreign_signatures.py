"""Signatures of files that are no source (magic bytes, texts, members, suffixes), each with a name and a hint."""

from __future__ import annotations

ForeignKind = tuple[str, str]  # "an OpenVINO model (IR XML)", hint
ORIGINAL = "Give the original model (PyTorch, safetensors or ONNX)"
UNPACK = "Unpack it first"
DATA = "Did you mean --data?"
RIGHT_FILE = "Is it the right file?"
AS_ONNX = "Give the model as ONNX"
TO_ONNX = "onnxmltools converts such models to ONNX"
TF2ONNX = "Convert the model to ONNX with tf2onnx"
LIBRARIES = ("sklearn", "xgboost", "lightgbm", "catboost")  # whose pickles hold models
CONVERTERS = "It was not opened. skl2onnx and onnxmltools convert such models to ONNX"
MXNET = "Export the model to ONNX from MXNet"
OPENVINO_WEIGHTS: ForeignKind = (
    "the weights of an OpenVINO model (.bin beside its .xml)",
    "Give the .xml file or its folder",
)
ADAPTER: ForeignKind = (
    "a LoRA adapter (PEFT), not a model",
    "Give its base model (--adapters makes room in the artifact), and the adapter to infer serve --lora, or merge it "
    "with merge_and_unload() of PEFT and save the model",
)
OTHER_ADAPTER: ForeignKind = (
    "an adapter (PEFT) of another kind than LoRA, not a model",
    "Merge it into its base model with merge_and_unload() of PEFT and save that",
)
KOHYA: ForeignKind = (
    "a LoRA file of kohya's sd-scripts (lora_unet_…, lora_te_…), not a model",
    "Load it into its base with diffusers, pipeline.load_lora_weights(FILE) and fuse_lora(), and give the folder of "
    "pipeline.save_pretrained; or convert it to PEFT's format",
)
DEEPSPEED: ForeignKind = (
    "a DeepSpeed checkpoint",
    "Make one file of it with the zero_to_fp32.py that lies beside it",
)
ORBAX: ForeignKind = (
    "a JAX checkpoint (Orbax)",
    "Convert its weights to PyTorch and save them as safetensors, or export the model to ONNX",
)
FLAX: ForeignKind = (
    "Flax weights (.msgpack)",
    "Save them as safetensors with transformers 4: from_pretrained(…, from_flax=True), then save_pretrained",
)
NEMO: ForeignKind = (
    "a NeMo model (.nemo)",
    "Unpack it (tar): its model_weights.ckpt is a state dict, for --model file.py:build; or export it to ONNX",
)
OLD_TORCH: ForeignKind = (
    "a tar file of torch before 0.1.10",
    "Open it with torch.load and save its state dict again",
)
AOTI: ForeignKind = (
    "an AOTInductor package (.pt2), which is compiled for one kind of machine",
    "Give the model it was compiled from, or its program saved with torch.export.save",
)
TORCH_PACKAGE: ForeignKind = (
    "an archive of torch.package, which holds the model's code",
    "Import the model with torch.package.PackageImporter and save its state dict with torch.save, or a ScriptModule "
    "with torch.jit.save",
)
TENSORRT: ForeignKind = (
    "a TensorRT engine",
    "An engine holds no weights to read: give the model it was built from",
)
# Offset, first bytes, name, hint.
MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\n\x0e\n\x05<unk>", "a SentencePiece tokenizer", "Give the folder of the model that it belongs to"),
    (
        0,
        b"version https://git-lfs",
        "a git-LFS pointer, not the file it points to",
        "Run 'git lfs pull' in its repository",
    ),
    (0, b"BZh", "a bzip2 file", UNPACK),
    (0, b"\xfd7zXZ\x00", "an xz file", UNPACK),
    (0, b"(\xb5/\xfd", "a zstd file", UNPACK),
    (0, b"7z\xbc\xaf'\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!", "a RAR archive", UNPACK),
    (0, b"\x93NUMPY", "one NumPy array (.npy), which is data, not a model", DATA),
    (0, b"PAR1", "a Parquet file, which is data, not a model", DATA),
    (0, b"ARROW1", "an Arrow file, which is data, not a model", DATA),
    (0, b"SQLite format 3", "an SQLite database", RIGHT_FILE),
    (0, b"\x89PNG", "a picture (PNG)", DATA),
    (0, b"\xff\xd8\xff", "a picture (JPEG)", DATA),
    (0, b"%PDF", "a PDF document", RIGHT_FILE),
    (0, b"\x89HDF", "an HDF5 file (Keras)", "Save the model from PyTorch, or export it to ONNX"),
    *(
        (0, magic, "a GGML file, of llama.cpp before GGUF", "Give the Hugging Face folder it was made from")
        for magic in (b"lmgg", b"fmgg", b"tjgg")
    ),
    (4, b"TFL3", "a TensorFlow Lite model (.tflite)", ORIGINAL),
    (4, b"ORTM", "an ONNX Runtime model (.ort)", "Give the .onnx file it was made from"),
    (4, b"ET12", "an ExecuTorch program (.pte)", "Give the PyTorch model it was exported from"),
    (0, b"ftrt", *TENSORRT),
    (0, b"ptrt", *TENSORRT),
    (0, b"\x12\x01\0\0\0\0\0\0", "MXNet parameters (.params)", MXNET),
    (0, b"{L\0\0\0\0\0\0\0\x07learner", "an XGBoost model (UBJSON)", TO_ONNX),
    (0, b"CBM1", "a CatBoost model", AS_ONNX),
    (0, b"\x7fELF", "a compiled library", "Give the model it was compiled from"),
    (0, b"MZ", "a Windows program or library", "Give the model it was compiled from"),
    *(
        (0, magic, "a zlib-compressed file (joblib writes such pickles)", "It was not opened. " + ORIGINAL)
        for magic in (b"x\x01", b"x^", b"x\x9c", b"x\xda")
    ),
)
# Endings of files without magic bytes.
SUFFIXES: dict[str, ForeignKind] = {
    ".engine": TENSORRT,
    ".plan": TENSORRT,
    ".trt": TENSORRT,
    ".pdmodel": ("a Paddle model (.pdmodel)", "Convert it to ONNX with paddle2onnx"),
    ".pdiparams": ("Paddle parameters (.pdiparams)", "Convert the model to ONNX with paddle2onnx"),
    ".msgpack": FLAX,
    ".ckpt": ("a checkpoint of TensorFlow, by its suffix", TF2ONNX),
    ".index": ("the index of a TensorFlow checkpoint, by its suffix", TF2ONNX),
    ".dlc": ("a Qualcomm SNPE model, by its suffix", ORIGINAL),
    ".rknn": ("a Rockchip RKNN model", ORIGINAL),
    ".tflite": ("a damaged TensorFlow Lite model: it lacks its TFL3 mark", ORIGINAL),
    ".mlmodel": ("a damaged Core ML model", "Give the PyTorch model it was converted from"),
}
# Text: a pattern at its beginning, after XML declaration and comments; name, hint.
TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        r"\((dp|lp|p)0\n|ccopy_reg\n",
        "a pickle of protocol 0",
        "It was not opened. Save the weights with torch.save, or as safetensors",
    ),
    (r"<PMML", "a PMML model (XML)", AS_ONNX),
    (r"(<!DOCTYPE svg[^>]*>\s*)?<svg", "a picture (SVG)", RIGHT_FILE),
    (
        r"<(!doctype html|html)",
        "a web page (HTML)",
        "The download saved an error or login page: fetch the raw file",
    ),
    (
        r"<Error>",
        "the error message of a file store (XML)",
        "The download was refused: check its address and the access rights",
    ),
    (r"\{.{0,4000}\"weight_map\"", "the index of a sharded checkpoint (JSON)", "Give the folder it lies in"),
    (
        r"\{.{0,4000}\"(architectures|model_type|transformers_version)\"",
        "the configuration of a model (JSON)",
        "Give the folder it lies in",
    ),
    (r"\{\s*\"nodes\"\s*:", "an MXNet symbol (JSON)", MXNET),
    (r"\{\s*\"learner\"", "an XGBoost model (JSON)", TO_ONNX),
    (
        r"\{.{0,4000}\"(modelTopology|weightsManifest)\"",
        "a TensorFlow.js model (JSON)",
        "Give the model it was converted from",
    ),
    (r"[{\[]\s*(\"|\{|\[|\}|\]|-?\d)", "a JSON file", RIGHT_FILE),
    (r"model_checkpoint_path\s*:", "the state of a TensorFlow checkpoint", TF2ONNX),
    (r"tree\s+version=", "a LightGBM model", TO_ONNX),
    (r"7767517\s", "an ncnn model (.param)", ORIGINAL),
    (
        r"(\s*#[^\n]*\n)*\s*(name\s*:\s*\"|layer\s*\{|input\s*:\s*\")",
        "a Caffe network (prototxt)",
        "Convert it to ONNX, or give a PyTorch model",
    ),
)
# What a zip holds, name, hint.
ZIPS: tuple[tuple[str, str, str], ...] = (
    ("MAR-INF/MANIFEST.json", "a TorchServe archive (.mar)", "Unpack it and give the model file in it"),
    ("model.weights.h5", "a Keras model (.keras)", "Export it to ONNX, or save the model from PyTorch"),
    ("model.params", "a Qualcomm SNPE model (.dlc)", ORIGINAL),
    ("word/document.xml", "a text document (.docx)", RIGHT_FILE),
    ("META-INF/MANIFEST.MF", "a Java archive (.jar)", RIGHT_FILE),
)
# What a folder holds, name, hint.
FOLDERS: tuple[tuple[str, str, str], ...] = (
    ("saved_model.pb", "a TensorFlow SavedModel", "Convert it to ONNX with tf2onnx"),
    ("adapter_config.json", *ADAPTER),
    ("gliner_config.json", "a GLiNER model, whose class transformers does not have",
     "Export it to ONNX with the package gliner, and give the .onnx file"),
    ("Data/com.apple.CoreML", "a Core ML package (.mlpackage)", "Give the PyTorch model it was converted from"),
    ("coremldata.bin", "a compiled Core ML model (.mlmodelc)", "Give the PyTorch model it was converted from"),
    ("*.distcp", "a distributed checkpoint (torch.distributed.checkpoint)",
     "Make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt"),
    ("*_optim_states.pt", *DEEPSPEED),
    ("*/*_optim_states.pt", *DEEPSPEED),
    ("*/*.distcp", "a folder with a distributed checkpoint (torch.distributed.checkpoint)",
     "Make one file of the folder in it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER "
     "model.pt"),
    ("_CHECKPOINT_METADATA", *ORBAX),
    ("manifest.ocdbt", *ORBAX),
    ("*.data-00000-of-*", "a TensorFlow checkpoint", TF2ONNX),
    ("*.engine", "a folder with a TensorRT engine", "Give the model it was built from"),
    ("*.pdmodel", "a Paddle model", "Convert it to ONNX with paddle2onnx"),
    ("MLmodel", "an MLflow model", "Give the model file in its data folder"),
    ("*.onnx", "a folder with an ONNX file", "Give the .onnx file itself"),
    ("*.gguf", "a folder with a GGUF file", "Give the .gguf file itself"),
    ("tf_model.h5", "a Hugging Face folder with TensorFlow weights", "Save it as safetensors from transformers"),
    ("flax_model.msgpack", "a Hugging Face folder with Flax weights", "Save it as safetensors from transformers"),
)  # fmt: skip
