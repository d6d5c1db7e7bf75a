//! Errors about files of tensors and sets of parameters.

use std::fmt;

use crate::layout::MAX_DIMENSIONS;

/// The longest header of a file in bytes: that of the reference implementation.
pub(super) const HEADER_MAX: u64 = 100_000_000;

/// The fault of a file of tensors. The file is at fault unless a variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointFault {
    /// It ends before its header does.
    #[error("the file ends in its header: {has} bytes of at least {needed}")]
    Truncated {
        /// Bytes that the header needs.
        needed: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// Its header claims a length beyond the limit.
    #[error("a header of {bytes} bytes, more than the {HEADER_MAX} there may be")]
    HeaderTooLong {
        /// The claimed bytes.
        bytes: u64,
    },
    /// Its header is no description of tensors that lie one after the other.
    #[error("the header describes no tensors: {problem}")]
    Header {
        /// The error of the parser.
        problem: String,
    },
    /// It is not as long as its tensors.
    #[error("header and tensors are {needed} bytes, the file is {has}")]
    Length {
        /// Bytes that header and tensors need.
        needed: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// A tensor is of a dtype that tensors here do not have. Leave it out by a filter, or load it
    /// as bytes ([`others_as_bytes`](super::Load::others_as_bytes)) unless its elements are less
    /// than a byte.
    #[error(
        "tensor {tensor:?} is of dtype {dtype}, which tensors here do not have; leave it out{}",
        if *element_bytes > 0 { " or load it as bytes" } else { ": its elements are less than a byte" }
    )]
    DType {
        /// The tensor.
        tensor: String,
        /// The dtype's name in the file.
        dtype: String,
        /// Bytes of an element; 0 if it is less than a byte.
        element_bytes: u64,
    },
    /// A tensor has too many dimensions or elements.
    #[error("tensor {tensor:?} of {shape:?} has more than {MAX_DIMENSIONS} dimensions or too many elements")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its extents.
        shape: Vec<usize>,
    },
    /// A tensor's name cannot be that of a parameter: it has an empty part.
    #[error("tensor {tensor:?} has an empty part in its name")]
    Name {
        /// The tensor.
        tensor: String,
    },
    /// Two files have a tensor of one name.
    #[error("tensor {tensor:?} is in {other}, too")]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// The other file.
        other: String,
    },
    /// The index is no map from tensors to files.
    #[error("the index maps no tensors to files: {problem}")]
    Index {
        /// The error of the parser.
        problem: String,
    },
    /// The index names a file outside its directory.
    #[error("the index names {file:?}, which is not a file in its directory")]
    ForeignFile {
        /// The name.
        file: String,
    },
    /// A tensor is not in the file where the index says.
    #[error("tensor {tensor:?} is not in {file}, where the index says")]
    Missing {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// The caller named a directory that has no file of tensors.
    #[error("the directory has no .safetensors file")]
    NoFiles,
    /// The file was changed after it was opened. Open it again.
    #[error("the file was changed after it was opened; open it again")]
    Changed,
}

/// The text of all differences that prevent loading files into a set.
pub(crate) fn mismatch(missing: &[String], unexpected: &[String], different: &[String]) -> String {
    let parts = [
        (missing, "missing from the files: "),
        (unexpected, "missing from the set: "),
        (different, "not of one shape and kind: "),
    ];
    let named = parts.iter().filter(|(names, _)| !names.is_empty());
    let named: Vec<String> = named.map(|(names, what)| format!("{what}{}", Listed(names))).collect();
    format!("files and set have different tensors: {}", named.join("; "))
}

/// A list in a message, cut after the first items.
pub(crate) struct Listed<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Display> fmt::Display for Listed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LISTED: usize = 10;
        for (position, item) in self.0.iter().take(LISTED).enumerate() {
            let between = if position > 0 { ", " } else { "" };
            write!(f, "{between}{item}")?;
        }
        match self.0.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
