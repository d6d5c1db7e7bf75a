//! Files and a set that do not have the same tensors.

use std::fmt;

use aquifer_kernels::DType;

use super::param_set::Listed;

/// What keeps files from being loaded into a set, all of it. Either is at fault; nothing was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct SetMismatch {
    /// Names in the set that are not in the files, in the set's order.
    pub missing: Vec<String>,
    /// Names in the files that are not in the set, in the files' order. Those that a filter leaves out are not expected.
    pub unexpected: Vec<String>,
    /// Tensors that are in both, and are not of one shape, or one kind of dtype.
    pub different: Vec<DifferentTensor>,
}

/// A tensor that is not the same in files and set.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DifferentTensor {
    /// Its name.
    pub name: String,
    /// The dtype's name in the file, such as `"BF16"`.
    pub file_dtype: String,
    /// Its extents in the file, outermost first.
    pub file_shape: Vec<usize>,
    /// Its dtype in the set.
    pub dtype: DType,
    /// Its extents in the set.
    pub shape: Vec<usize>,
    /// Where it is.
    pub place: String,
}

impl SetMismatch {
    pub(super) fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.different.is_empty()
    }
}

impl fmt::Display for SetMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("files and set have different tensors")?;
        let mut before = ": ";
        for (names, what) in [(&self.missing, "missing from the files: "), (&self.unexpected, "missing from the set: ")]
        {
            if !names.is_empty() {
                write!(f, "{before}{what}{}", Listed(names))?;
                before = "; ";
            }
        }
        if !self.different.is_empty() {
            write!(f, "{before}not of one shape and kind: {}", Listed(&self.different))?;
        }
        Ok(())
    }
}

impl fmt::Display for DifferentTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DifferentTensor { name, file_dtype, file_shape, dtype, shape, place } = self;
        write!(f, "{name} ({file_dtype} {file_shape:?} in the files, {dtype} {shape:?} on {place} in the set)")
    }
}
