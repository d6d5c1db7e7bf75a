//! What can be wrong with an input, and where.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::text::one_line;

/// How many layers of archives, pages and compression an input may have.
pub(super) const LAYERS_MAX: u32 = 4;
/// The longest line in bytes.
pub(super) const LINE_MAX: usize = 64 << 10;
/// The most header lines of a trace.
pub(super) const HEADERS_MAX: usize = 1024;
/// The longest error in characters, and the longest name of a file in it. With what stands before
/// it, an error has at most 300.
const LONGEST: usize = 280;
const LONGEST_PATH: usize = 120;

/// An input that cannot be used; displays as `FILE:PLACE: reason`, in one line of at most 280
/// characters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[error("{}", one_line(&self.whole(), LONGEST))]
pub struct InputError {
    /// The file.
    pub path: PathBuf,
    /// Which part of the file: `/NAME` in an archive, `[RANK]` in a list of snapshots; otherwise
    /// empty.
    pub part: String,
    /// Where in the file.
    pub location: Location,
    /// What is wrong there.
    pub reason: Reason,
}

impl InputError {
    fn whole(&self) -> String {
        let path = one_line(&self.path.display().to_string(), LONGEST_PATH);
        format!("{path}{}{}: {}", one_line(&self.part, LONGEST_PATH), self.location, self.reason)
    }
}

/// A place in an input. Displays as what follows the file's name.
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

/// What is wrong with an input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The operating system's error.
    #[error("{0}")]
    Io(io::Error),
    /// The compressed data stops early.
    #[error("the {what} data is truncated: the file ends at byte {length}, before the data does")]
    Truncated {
        /// The kind of data.
        what: &'static str,
        /// The file's length.
        length: u64,
    },
    /// What follows the compressed data is something else.
    #[error("other bytes follow the {what} data, from byte {offset} of the file on")]
    TrailingBytes {
        /// The kind of data.
        what: &'static str,
        /// Where they start in the file, counted from 0.
        offset: u64,
    },
    /// The packed data is damaged, or packed in a way that is not read.
    #[error("the {what} data is damaged or not supported: {why}")]
    Damaged {
        /// The kind of data.
        what: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// Packed again and again.
    #[error("it is packed more than {} times over", LAYERS_MAX)]
    TooManyLayers,
    /// More than anything of use holds.
    #[error(
        "{stored} bytes of the file hold more up to here than any recording has in as many; \
         it is none, or was made to take memory"
    )]
    TooDense {
        /// Bytes as they are stored, compressed or not.
        stored: u64,
    },
    /// There is nothing in it.
    #[error("the file is empty")]
    Empty,
    /// It is a trace or a log, and nothing happens in it.
    #[error("the file has no events, so there is nothing to replay")]
    NoEvents,
    /// The content is of no known format.
    #[error("not an allocation trace, a PyTorch memory snapshot or an RMM log: found {found}{hint}")]
    Unrecognised {
        /// What it begins with.
        found: String,
        /// What the file's name promised; may be empty.
        hint: &'static str,
    },
    /// The wrong one of RMM's logs.
    #[error(
        "this is RMM's debug log; Aquifer reads its CSV log, which RMM writes to the file that RMM_LOG_FILE or a \
         logging resource adaptor names"
    )]
    DebugLog,
    /// An archive or a page without anything to replay.
    #[error("{0} has no recording in it")]
    NothingInside(&'static str),
    /// More bytes than a file of its kind has.
    #[error("the file is longer than {} MiB", most >> 20)]
    TooLong {
        /// The most that it may have.
        most: u64,
    },
    /// A line that no text format has.
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
        /// What it should be.
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
        /// What stands there.
        text: String,
    },
    /// An allocation under a name that is in use.
    #[error("{0} is already allocated")]
    AlreadyLive(Block),
    /// A use or free of something that is not allocated.
    #[error("{0} is not allocated: it never was, or has been freed")]
    NotLive(Block),
    /// A free that names another stream than its allocation did.
    #[error("the free names stream {freed}, the allocation named stream {allocated}")]
    WrongStream {
        /// The allocation's stream.
        allocated: u64,
        /// The free's stream.
        freed: u64,
    },
    /// The live bytes exceed what 64 bits hold.
    #[error("the bytes allocated exceed 64 bits")]
    TooManyBytes,
    /// More events, blocks or objects than 32 bits count.
    #[error("more than 2^32 {0}")]
    TooMany(&'static str),
    /// The host lacks memory for what the input holds.
    #[error("there is not enough memory for what it holds")]
    OutOfMemory,
    /// More streams than 16 bits count.
    #[error("more than 65536 streams")]
    TooManyStreams,
    /// More header lines than any trace has.
    #[error("more than {} header lines", HEADERS_MAX)]
    TooManyHeaders,
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
        /// What it is instead.
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
}

impl From<std::collections::TryReserveError> for Reason {
    fn from(_: std::collections::TryReserveError) -> Self {
        Self::OutOfMemory
    }
}

/// The name an input has for a block of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Block {
    /// A number of its own.
    Id(u64),
    /// Its address.
    Address(u64),
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "ID {id}"),
            Self::Address(address) => write!(f, "address {address:#x}"),
        }
    }
}

/// What is wrong with packed data, on its way through [`io::Error`].
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum Damage {
    /// The file has so many bytes, and the data goes on.
    #[error("it ends at byte {at}")]
    Truncated { what: &'static str, at: u64 },
    /// Something else starts there.
    #[error("other bytes follow from byte {at} on")]
    Trailing { what: &'static str, at: u64 },
    /// The decoder does not understand it.
    #[error("{why}")]
    Broken { what: &'static str, why: String },
    /// It holds more than any recording.
    #[error("it holds more than a recording")]
    TooDense { stored: u64 },
}

impl Damage {
    /// An error of a decoder, unless what it reads from has failed.
    pub(super) fn broken(what: &'static str, error: io::Error) -> io::Error {
        let passed_on = error.raw_os_error().is_some() || error.get_ref().is_some_and(|inner| inner.is::<Self>());
        if passed_on || error.kind() == io::ErrorKind::Interrupted {
            return error;
        }
        Self::Broken { what, why: error.to_string() }.into()
    }
}

impl From<Damage> for io::Error {
    fn from(damage: Damage) -> Self {
        Self::new(io::ErrorKind::InvalidData, damage)
    }
}

/// An error before its file is known.
#[derive(Debug)]
pub(super) struct Fault {
    part: String,
    location: Location,
    reason: Reason,
}

impl Fault {
    pub(super) fn new(location: Location, reason: Reason) -> Self {
        Self { part: String::new(), location, reason }
    }

    pub(super) fn file(reason: Reason) -> Self {
        Self::new(Location::File, reason)
    }

    pub(super) fn reason(&self) -> &Reason {
        &self.reason
    }

    /// The same in a part of the file.
    pub(super) fn within(mut self, part: &str) -> Self {
        self.part.insert_str(0, part);
        self
    }

    pub(super) fn at(self, path: &Path) -> InputError {
        InputError { path: path.to_owned(), part: self.part, location: self.location, reason: self.reason }
    }
}

impl Reason {
    /// Tells a damaged file from the operating system's errors.
    pub(super) fn from_read(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Damage>()) {
            Some(&Damage::Truncated { what, at }) => Self::Truncated { what, length: at },
            Some(&Damage::Trailing { what, at }) => Self::TrailingBytes { what, offset: at },
            Some(Damage::Broken { what, why }) => Self::Damaged { what, why: why.clone() },
            Some(&Damage::TooDense { stored }) => Self::TooDense { stored },
            None => Self::Io(error),
        }
    }
}
