//! Errors of inputs, and their locations.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::text::one_line;

/// The longest line in bytes.
pub(super) const LINE_MAX: usize = 64 << 10;
/// The longest error in characters, and the longest file name in it. With its prefix an error has
/// at most 300 characters.
const LONGEST: usize = 280;
const LONGEST_PATH: usize = 120;

/// An input that cannot be used; displays as `FILE:PLACE: reason`, in one line of at most 280
/// characters.
#[derive(Debug, thiserror::Error)]
#[error("{}", one_line(&self.whole(), LONGEST))]
pub struct InputError {
    /// The file.
    pub path: PathBuf,
    /// The place in the file.
    pub location: Location,
    /// The reason.
    pub reason: Reason,
}

impl InputError {
    fn whole(&self) -> String {
        let path = one_line(&self.path.display().to_string(), LONGEST_PATH);
        format!("{path}{}: {}", self.location, self.reason)
    }
}

/// A place in an input. Displays as the suffix of the file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// The file as a whole.
    File,
    /// A line of text, counted from 1.
    Line(u64),
    /// A byte of the (decompressed) content, counted from 0.
    Byte(u64),
    /// An entry of a snapshot's `device_traces[device]`, counted from 0.
    Entry {
        /// The device's ordinal.
        device: u32,
        /// The entry's index.
        index: usize,
    },
    /// A segment of a snapshot, counted from 0.
    Segment {
        /// The segment's index.
        segment: usize,
    },
    /// A block of a snapshot's segment, counted from 0.
    Block {
        /// The segment's index.
        segment: usize,
        /// The block's index.
        block: usize,
    },
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Line(line) => write!(f, ":{line}"),
            Self::Byte(byte) => write!(f, ":byte {byte}"),
            Self::Entry { device, index } => write!(f, ":device_traces[{device}][{index}]"),
            Self::Segment { segment } => write!(f, ":segments[{segment}]"),
            Self::Block { segment, block } => write!(f, ":segments[{segment}].blocks[{block}]"),
        }
    }
}

/// Why an input cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The operating system's error.
    #[error("{0}")]
    Io(io::Error),
    /// Compressed data without its end.
    #[error("the {0} data is incomplete: it is cut off, or other bytes follow it")]
    Truncated(&'static str),
    /// The packed data is damaged, or packed in an unsupported way.
    #[error("the {what} data is damaged or not supported: {why}")]
    Damaged {
        /// The kind of data.
        what: &'static str,
        /// The decoder's error.
        why: String,
    },
    /// More content than a recording of this size has.
    #[error(
        "the first {stored} bytes of the file hold more than a recording of that size can: \
         it is not a recording, or was made to exhaust memory"
    )]
    TooDense {
        /// Bytes as they are stored, compressed or not.
        stored: u64,
    },
    /// A folder without files.
    #[error("the folder has no files")]
    EmptyFolder,
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// A trace or a log without events.
    #[error("the file has no events, so there is nothing to replay")]
    NoEvents,
    /// The format is unknown.
    #[error("not an allocation trace, a PyTorch memory snapshot or an RMM log: found {found}{hint}")]
    Unrecognised {
        /// Its beginning.
        found: String,
        /// Advice that the file's name suggests; may be empty.
        hint: &'static str,
    },
    /// More bytes than a file of its kind has.
    #[error("the file is longer than {} MiB", most >> 20)]
    TooLong {
        /// The limit.
        most: u64,
    },
    /// A line beyond the limit.
    #[error("the line is longer than {} KiB", LINE_MAX >> 10)]
    LineTooLong,
    /// Text in another encoding.
    #[error("the text is not UTF-8")]
    NotUtf8,
    /// A line or row of an unknown kind.
    #[error("unknown kind {0:?}; expected {1}")]
    UnknownKind(String, &'static str),
    /// A line with too few fields.
    #[error("the field {0} is missing")]
    MissingField(&'static str),
    /// A field of another type.
    #[error("the field {field} is not {expected}")]
    WrongType {
        /// The field.
        field: &'static str,
        /// The expected type.
        expected: &'static str,
    },
    /// A line with too many fields.
    #[error("unexpected {0:?} at the end of the line")]
    TrailingField(String),
    /// A field that is not a number, or one out of range.
    #[error("{text:?} is not a valid {field}")]
    BadNumber {
        /// The field.
        field: &'static str,
        /// The text found.
        text: String,
    },
    /// An allocation under an ID that is in use.
    #[error("ID {0} is already allocated")]
    AlreadyLive(u64),
    /// A use or free of an ID that is not allocated.
    #[error("ID {0} is not allocated: it never was, or has been freed")]
    NotLive(u64),
    /// A free that names another stream than its allocation.
    #[error("the free names stream {freed}, the allocation named stream {allocated}")]
    WrongStream {
        /// The allocation's stream.
        allocated: u64,
        /// The free's stream.
        freed: u64,
    },
    /// More live bytes than 64 bits hold.
    #[error("the bytes allocated exceed 64 bits")]
    TooManyBytes,
    /// More events, blocks, streams or header lines than are supported.
    #[error("more than {0}")]
    TooMany(&'static str),
    /// The host lacks memory for the content.
    #[error("the host does not have enough memory for its content")]
    OutOfMemory,
    /// A pickle opcode of old protocols, or of none.
    #[error("unsupported pickle opcode 0x{code:02x}")]
    Opcode {
        /// The opcode.
        code: u8,
    },
    /// A pickle that breaks the rules of its machine.
    #[error("damaged pickle: {0}")]
    Pickle(&'static str),
    /// Malformed JSON, or JSON of another structure.
    #[error("{0}")]
    Json(serde_json::Error),
    /// Data, but no snapshot.
    #[error("not a memory snapshot: found {found}")]
    NotASnapshot {
        /// The content found instead.
        found: String,
    },
    /// A snapshot of another structure.
    #[error("not a memory snapshot: {0}")]
    Structure(&'static str),
    /// A snapshot without events.
    #[error(
        "the snapshot has no history, so there is nothing to replay; \
         call torch.cuda.memory._record_memory_history() before the program runs, then take the snapshot"
    )]
    NoHistory,
    /// A recording that does not name blocks by their addresses.
    #[error("the recording has no addresses of blocks; take a snapshot with a history")]
    NoAddresses,
}

impl Reason {
    /// Whether the input is no recording, or has nothing in it. A damaged one was recorded.
    pub fn is_other_content(&self) -> bool {
        matches!(
            self,
            Reason::EmptyFolder
                | Reason::Empty
                | Reason::NoEvents
                | Reason::Unrecognised { .. }
                | Reason::NotASnapshot { .. }
                | Reason::Structure(_)
                | Reason::NoHistory
        )
    }
}

impl From<std::collections::TryReserveError> for Reason {
    fn from(_: std::collections::TryReserveError) -> Self {
        Self::OutOfMemory
    }
}

/// An error before its file is known.
#[derive(Debug)]
pub(super) struct Fault {
    location: Location,
    pub(super) reason: Reason,
}

impl Fault {
    pub(super) fn new(location: Location, reason: Reason) -> Self {
        Self { location, reason }
    }

    pub(super) fn file(reason: Reason) -> Self {
        Self::new(Location::File, reason)
    }

    pub(super) fn at(self, path: &Path) -> InputError {
        InputError { path: path.to_owned(), location: self.location, reason: self.reason }
    }
}

impl Reason {
    /// The reason of an error of reading, which [`io::Error`] may carry.
    pub(super) fn from_read(error: io::Error) -> Self {
        error.downcast::<Self>().unwrap_or_else(Self::Io)
    }
}

impl From<Reason> for io::Error {
    fn from(reason: Reason) -> Self {
        Self::new(io::ErrorKind::InvalidData, reason)
    }
}
