"""Names by which torch and Python say what a function does to memory."""

__all__ = ["KNOWN_MODULES", "PYTHON_MODULES", "QUESTIONS", "VIEWS", "WRITING_OPERATORS"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PYTHON_MODULES = _words("_operator operator math builtins")
"""Modules of Python whose functions are told by their names."""

KNOWN_MODULES = PYTHON_MODULES | {"torch"}

WRITING_OPERATORS = _words("""
    delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv
    ixor setitem
""")
"""Of Python's module ``operator``, in which other names end in an underscore (``and_``)."""

VIEWS = _words("""
    H T _conj _neg_view _reshape_alias _unsafe_view adjoint alias align_as align_to alpha_dropout
    as_strided as_tensor asarray atleast_1d atleast_2d atleast_3d bfloat16 bool broadcast_tensors
    broadcast_to byte cartesian_prod ccol_indices cdouble cfloat chalf channel_shuffle char chunk
    col_indices conj contiguous cpu crow_indices cuda data detach diagonal double dropout dropout1d
    dropout2d dropout3d dsplit einsum expand expand_as feature_alpha_dropout feature_dropout
    flatten float from_numpy getitem half hsplit imag indices int lift lift_fresh long mH mT
    meshgrid moveaxis movedim narrow native_channel_shuffle nested_view_from_buffer numpy permute
    pin_memory pixel_shuffle pixel_unshuffle pos positive ravel real refine_names rename
    requires_grad_ reshape reshape_as resolve_conj resolve_neg row_indices select short slice split
    split_with_sizes squeeze sum_to_size swapaxes swapdims t tensor_split to to_dense to_device
    transpose type type_as unbind unflatten unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze untyped_storage values view view_as view_as_complex
    view_as_real vsplit
""")
"""Functions, methods and attributes of torch whose result may share memory with what they read:
views, and those that return their operand where there is nothing to do."""

QUESTIONS = _words("""
    device dim dtype element_size getattr is_complex is_contiguous is_floating_point layout ndim
    ndimension nelement numel shape size storage_offset stride sym_numel sym_size sym_stride
""")
"""What reads the form of a tensor, and not what it holds."""
