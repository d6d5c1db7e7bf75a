//! Names and texts of codes.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::LazyLock;

use aquifer_device::Code;

use crate::abi::{Out, abi, needed};

/// Codes lie below this.
const CODES_END: u32 = 1000;

/// Name and text of each code that the project knows, and of success.
static TEXTS: LazyLock<BTreeMap<u32, (CString, CString)>> = LazyLock::new(|| {
    let entry = |name: &str, text: &str| Some((CString::new(name).ok()?, CString::new(text).ok()?));
    let known = (1..CODES_END).filter_map(|code| {
        let name = Code(code).name();
        let text = name.strip_prefix("CUDA_ERROR_").filter(|rest| !rest.starts_with('('))?;
        Some((code, entry(name, &text.to_ascii_lowercase().replace('_', " "))?))
    });
    known.chain(entry("CUDA_SUCCESS", "no error").map(|success| (0, success))).collect()
});

/// Whether bindings can be expected to know the code.
pub(crate) fn is_known(code: Code) -> bool {
    TEXTS.contains_key(&code.0)
}

abi! {
    /// The name of a code, such as `CUDA_ERROR_OUT_OF_MEMORY`; null and `INVALID_VALUE` for one
    /// that is not known.
    6000 cuGetErrorName(_call, error: u32, text: Out<'_, *const c_char>) {
        let found = TEXTS.get(&error);
        needed(text)?.write(found.map_or(std::ptr::null(), |(name, _)| name.as_ptr()));
        found.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    /// The text of a code, such as `out of memory`; null and `INVALID_VALUE` for one that is not
    /// known.
    6000 cuGetErrorString(_call, error: u32, text: Out<'_, *const c_char>) {
        let found = TEXTS.get(&error);
        needed(text)?.write(found.map_or(std::ptr::null(), |(_, text)| text.as_ptr()));
        found.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
}
