// The C functions that the Python bindings of TensorRT link against. Every factory returns null: the bindings can be
// imported and inspected, nothing can be built or run.
#define STUB(name) extern "C" void* name() { return nullptr; }

STUB(createInferBuilder_INTERNAL)
STUB(createInferRefitter_INTERNAL)
STUB(createInferRuntime_INTERNAL)
STUB(createNvOnnxParserRefitter_INTERNAL)
STUB(createNvOnnxParser_INTERNAL)
STUB(getBuilderPluginRegistry)
STUB(getPluginRegistry)
STUB(initLibNvInferPlugins)
extern "C" int getNvOnnxParserVersion() { return 0; }
extern "C" int getInferLibVersion() { return 0; }
