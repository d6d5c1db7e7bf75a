//! What can be wrong with an input, and where.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An input that cannot be used; displays as `FILE:PLACE: reason`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[error("{}{location}: {reason}", path.display())]
pub struct InputError {
    /// The file.
    pub path: PathBuf,
    /// Where in the file.
    pub location: Location,
    /// What is wrong there.
    pub reason: Reason,
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
    #[error("the gzip data is truncated: the file ends at byte {length}, before the data does")]
    TruncatedGzip {
        /// The file's length.
        length: u64,
    },
    /// What follows the compressed data is something else.
    #[error("other bytes follow the gzip data, from byte {offset} of the file on")]
    TrailingBytes {
        /// Where they start in the file, counted from 0.
        offset: u64,
    },
    /// More than anything of use holds.
    #[error(
        "{stored} bytes of the file hold more values up to here than any memory snapshot has in as many; \
         it is none, or was made to take memory"
    )]
    TooDense {
        /// Bytes as they are stored, compressed or not.
        stored: u64,
    },
    /// The compressed data is damaged.
    #[error("the gzip data is damaged: {0}")]
    DamagedGzip(io::Error),
    /// There is nothing in it.
    #[error("the file is empty")]
    Empty,
    /// It is a trace or a log, and nothing happens in it.
    #[error("the file has no events, so there is nothing to replay")]
    NoEvents,
    /// The content is of no known format.
    #[error("not an allocation trace, a PyTorch memory snapshot or an RMM log{hint}")]
    Unrecognised {
        /// What the file's name promised; may be empty.
        hint: &'static str,
    },
    /// More bytes than a file of its kind has.
    #[error("the file is longer than {} MiB", most >> 20)]
    TooLong {
        /// The most that it may have.
        most: u64,
    },
    /// A line that no text format has.
    #[error("the line is longer than {} KiB", super::lines::LONGEST >> 10)]
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
    #[error("more than {} header lines", super::trace::MOST_HEADERS)]
    TooManyHeaders,
    /// A pickle opcode that memory snapshots do not use.
    #[error("unsupported pickle opcode 0x{code:02x}{}; memory snapshots hold plain data only", OpcodeName(*.code))]
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

/// The names of the opcodes that run code or that other pickles commonly have.
struct OpcodeName(u8);

impl fmt::Display for OpcodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            b'c' => "GLOBAL",
            0x93 => "STACK_GLOBAL",
            b'R' => "REDUCE",
            b'b' => "BUILD",
            b'i' => "INST",
            b'o' => "OBJ",
            0x81 => "NEWOBJ",
            0x92 => "NEWOBJ_EX",
            b'P' => "PERSID",
            b'Q' => "BINPERSID",
            0x82..=0x84 => "EXT",
            b'B' | b'C' | 0x8e | 0x96 => "BYTES",
            0x8f..=0x91 => "SET",
            _ => return Ok(()),
        };
        write!(f, " ({name})")
    }
}

/// What is wrong with compressed data, on its way through [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(super) enum Damage {
    /// The file has so many bytes, and the data goes on.
    #[error("it ends at byte {0}")]
    Truncated(u64),
    /// Something else starts there.
    #[error("other bytes follow from byte {0} on")]
    Trailing(u64),
}

impl From<Damage> for io::Error {
    fn from(damage: Damage) -> Self {
        Self::new(io::ErrorKind::InvalidData, damage)
    }
}

/// An error before its file is known.
#[derive(Debug)]
pub(super) struct Fault {
    location: Location,
    reason: Reason,
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
    /// Tells a damaged file from the operating system's errors: only the decompressor reports these kinds.
    pub(super) fn from_read(error: io::Error) -> Self {
        let damage = error.get_ref().and_then(|inner| inner.downcast_ref::<Damage>());
        match (damage, error.kind()) {
            (Some(&Damage::Truncated(length)), _) => Self::TruncatedGzip { length },
            (Some(&Damage::Trailing(offset)), _) => Self::TrailingBytes { offset },
            (None, io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput) => Self::DamagedGzip(error),
            _ => Self::Io(error),
        }
    }
}
