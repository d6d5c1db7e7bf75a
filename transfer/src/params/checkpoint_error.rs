//! What is wrong with files of tensors.

use std::fmt;

use crate::layout::MAX_DIMENSIONS;

/// A file that cannot be loaded, and why. Nothing was loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {fault}")]
#[non_exhaustive]
pub struct CheckpointError {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub fault: CheckpointFault,
}

/// What is wrong with a file of tensors. The file is at fault unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointFault {
    /// It ends before its header does.
    Truncated {
        /// Bytes that the header needs.
        needed: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// Its header says that it is longer than any is.
    HeaderTooLong {
        /// Bytes that it says.
        bytes: u64,
    },
    /// Its header is no description of tensors that lie one after the other.
    Header {
        /// What the parser says.
        problem: String,
    },
    /// It is not as long as its tensors.
    Length {
        /// Bytes that header and tensors need.
        needed: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// A tensor is of a dtype that tensors here do not have. Leave it out by a filter, or load it as bytes
    /// ([`crate::OtherDTypes::AsBytes`]) unless its elements are less than a byte.
    DType {
        /// The tensor.
        tensor: String,
        /// The dtype's name in the file.
        dtype: String,
        /// Bytes of an element; 0 if it is less than a byte.
        element_bytes: u64,
    },
    /// A tensor has too many dimensions or elements.
    Shape {
        /// The tensor.
        tensor: String,
        /// Its extents.
        shape: Vec<usize>,
    },
    /// A tensor's name cannot be that of a parameter: it has an empty part.
    Name {
        /// The tensor.
        tensor: String,
    },
    /// Two files have a tensor of one name.
    Duplicate {
        /// The tensor.
        tensor: String,
        /// The other file.
        other: String,
    },
    /// The index is no map from tensors to files.
    Index {
        /// What the parser says.
        problem: String,
    },
    /// The index names a file that is not beside it.
    ForeignFile {
        /// The name.
        file: String,
    },
    /// A tensor is not in the file where the index says.
    Missing {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// The caller named a directory that has no file of tensors.
    NoFiles,
    /// Somebody changed the file after it was opened. Open it again.
    Changed,
}

impl fmt::Display for CheckpointFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CheckpointFault::Truncated { needed, has } => {
                write!(f, "the file ends in its header: {has} bytes of at least {needed}")
            }
            CheckpointFault::HeaderTooLong { bytes } => {
                write!(f, "a header of {bytes} bytes, more than the {} there may be", super::checkpoint::HEADER_MAX)
            }
            CheckpointFault::Header { problem } => write!(f, "the header describes no tensors: {problem}"),
            CheckpointFault::Length { needed, has } => {
                write!(f, "header and tensors are {needed} bytes, the file is {has}")
            }
            CheckpointFault::DType { tensor, dtype, element_bytes } => {
                let advice = if *element_bytes > 0 {
                    "leave it out or load it as bytes"
                } else {
                    "leave it out: its elements are less than a byte"
                };
                write!(f, "tensor {tensor:?} is of dtype {dtype}, which tensors here do not have; {advice}")
            }
            CheckpointFault::Shape { tensor, shape } => {
                write!(
                    f,
                    "tensor {tensor:?} of {shape:?} has more than {MAX_DIMENSIONS} dimensions or too many elements"
                )
            }
            CheckpointFault::Name { tensor } => write!(f, "tensor {tensor:?} has an empty part in its name"),
            CheckpointFault::Duplicate { tensor, other } => write!(f, "tensor {tensor:?} is in {other}, too"),
            CheckpointFault::Index { problem } => write!(f, "the index maps no tensors to files: {problem}"),
            CheckpointFault::ForeignFile { file } => write!(f, "the index names {file:?}, which is no file beside it"),
            CheckpointFault::Missing { tensor, file } => {
                write!(f, "tensor {tensor:?} is not in {file}, where the index says")
            }
            CheckpointFault::NoFiles => f.write_str("the directory has no .safetensors file"),
            CheckpointFault::Changed => f.write_str("the file was changed after it was opened; open it again"),
        }
    }
}
