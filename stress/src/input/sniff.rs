//! What a file holds.

use std::io::{Cursor, Read};
use std::path::Path;

use super::error::{Fault, Reason};
use super::gzip::{Counted, Members, Stored};
use super::rmm;

/// The formats, compression aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Trace,
    Pickle,
    Json,
    Rmm,
}

/// What says that text is UTF-8.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// How much of the content decides.
const HEAD: u64 = 4096;

/// A format, the content, decompressed, and how much of the file was read for it.
type Opened<'a> = (Format, Box<dyn Read + 'a>, Stored);

/// Tells the format of `bytes` and gives the content.
pub(super) fn open<'a>(path: &Path, bytes: impl Read + 'a) -> Result<Opened<'a>, Fault> {
    let mut bytes = bytes;
    let magic = head(&mut bytes, 2)?;
    let compressed = magic == [0x1f, 0x8b];
    let bytes = Cursor::new(magic).chain(bytes);
    let stored = Stored::default();
    let mut content: Box<dyn Read + 'a> = if compressed {
        Box::new(Members::new(bytes, stored.clone()))
    } else {
        Box::new(Counted::new(bytes, stored.clone()))
    };
    let mut head = head(&mut content, HEAD)?;
    // Editors on Windows put a mark at the start of text.
    if head.starts_with(MARK) {
        head.drain(..MARK.len());
    }
    let format = format(path, &head)?;
    Ok((format, Box::new(Cursor::new(head).chain(content)), stored))
}

fn head(content: &mut impl Read, most: u64) -> Result<Vec<u8>, Fault> {
    let mut head = Vec::new();
    match content.by_ref().take(most).read_to_end(&mut head) {
        Ok(_) => Ok(head),
        Err(error) => Err(Fault::file(Reason::from_read(error))),
    }
}

fn format(path: &Path, head: &[u8]) -> Result<Format, Fault> {
    if head.is_empty() {
        return Err(Fault::file(Reason::Empty));
    }
    let line = head.split(|&byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
    match head.trim_ascii_start().first() {
        Some(0x80) => Ok(Format::Pickle),
        Some(b'{' | b'[') => Ok(Format::Json),
        _ if std::str::from_utf8(line).is_ok_and(rmm::is_header) => Ok(Format::Rmm),
        None | Some(b'#' | b'a' | b'f' | b'r' | b'i') => Ok(Format::Trace),
        _ => Err(Fault::file(Reason::Unrecognised { hint: hint(path) })),
    }
}

/// What the file's name promised.
fn hint(path: &Path) -> &'static str {
    let name = path.to_string_lossy().to_ascii_lowercase();
    match name.strip_suffix(".gz").unwrap_or(&name).rsplit('.').next() {
        Some("pickle" | "pkl") => "; a pickle must be of protocol 2 or newer",
        Some("csv") => "; an RMM log starts with the line Thread,Time,Action,Pointer,Size,Stream",
        Some("json") => "; JSON must start with {",
        Some("trace") => "; a trace's lines start with #, a, f, r or i",
        _ => "",
    }
}

/// The file's name without what only tells the format.
pub(super) fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut stem = &*name;
    for suffix in [".gz", ".trace", ".pickle", ".pkl", ".json", ".csv"] {
        stem = stem.strip_suffix(suffix).filter(|stem| !stem.is_empty()).unwrap_or(stem);
    }
    stem.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_decides() {
        let tell = |head: &[u8]| format("x.trace".as_ref(), head).ok();
        assert_eq!(tell(b"# k: v\n"), Some(Format::Trace));
        assert_eq!(tell(b"\n a 0 1 0"), Some(Format::Trace));
        assert_eq!(tell(b"\x80\x04}"), Some(Format::Pickle));
        assert_eq!(tell(b"  {\"segments\":"), Some(Format::Json));
        assert_eq!(tell(b"Thread, Time,Action,Pointer,Size,Stream\r\n1"), Some(Format::Rmm));
        assert_eq!(tell(b"Thread,Time,Action,Pointer,Size,Stream\r1"), Some(Format::Rmm));
        assert_eq!(tell(b"PK\x03\x04"), None);
        assert_eq!(tell(b""), None);
    }

    #[test]
    fn text_may_be_marked_as_such() {
        let mut text = String::new();
        let (format, mut content, _) = open("x".as_ref(), "\u{feff}# k: v\n".as_bytes()).ok().unwrap();
        content.read_to_string(&mut text).unwrap();
        assert_eq!((format, &*text), (Format::Trace, "# k: v\n"));
    }

    #[test]
    fn names_lose_their_suffixes() {
        for (path, name) in [("a/gpt.trace.gz", "gpt"), ("s.pickle", "s"), ("log.csv", "log"), (".gz", ".gz"), ("", "")]
        {
            assert_eq!(stem(path.as_ref()), name);
        }
    }
}
