//! Recognises the format of a file.

use std::io::{Cursor, Read};
use std::path::Path;

use super::error::{Fault, Reason};
use super::gzip::{Content, head};
use super::{rmm, trace};
use crate::text::one_line;

/// The formats, compression aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Trace,
    Pickle,
    Json,
    Rmm,
}

/// The byte-order mark of UTF-8.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// How many bytes of the content are examined.
const HEAD: u64 = 1 << 10;

/// Recognises the format of the content.
pub(super) fn open<'a>(path: &Path, mut content: Content<'a>) -> Result<(Format, Content<'a>), Fault> {
    let mut head = head(&mut content, HEAD)?;
    // Editors on Windows put a mark at the start of text.
    if head.starts_with(MARK) {
        head.drain(..MARK.len());
    }
    let format = format(path, &head).map_err(Fault::file)?;
    Ok((format, Box::new(Cursor::new(head).chain(content))))
}

fn format(path: &Path, head: &[u8]) -> Result<Format, Reason> {
    if head.is_empty() {
        return Err(Reason::Empty);
    }
    let mut lines = head.split(|&byte| byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let first = lines.find(|line| !line.trim().is_empty()).unwrap_or_default();
    match head.trim_ascii_start() {
        [0x80, ..] => Ok(Format::Pickle),
        [b'{' | b'[', ..] => Ok(Format::Json),
        [] => Ok(Format::Trace),
        _ if trace::is_line(first) => Ok(Format::Trace),
        _ if rmm::is_header(first) => Ok(Format::Rmm),
        start => Err(Reason::Unrecognised { found: found(start, first), hint: hint(path) }),
    }
}

/// Describes the beginning of the content.
fn found(start: &[u8], line: &str) -> String {
    let known: [(&[u8], &str); 11] = [
        (b"BZh", "data that bzip2 compressed; unpack it first"),
        (b"\xfd7zXZ\0", "data that xz compressed; unpack it first"),
        (b"\x28\xb5\x2f\xfd", "data that zstd compressed; unpack it first"),
        (b"\x1f\x8b", "data that gzip compressed twice; unpack it first"),
        (b"PK", "a zip archive; unpack it first, a folder is read as the ranks of a job"),
        (b"<", "a page; give the snapshot that it shows"),
        (b"\xff\xfe", "text in UTF-16, not in UTF-8"),
        (b"\xfe\xff", "text in UTF-16, not in UTF-8"),
        (b"7z\xbc\xaf", "a 7-Zip archive; unpack it first"),
        (b"SQLite format 3", "an SQLite database"),
        (b"(", "a pickle of protocol 0 or 1"),
    ];
    if let Some((_, what)) = known.iter().find(|(magic, _)| start.starts_with(magic)) {
        return (*what).to_owned();
    }
    if start.get(257..262) == Some(b"ustar") {
        return "a tar archive; unpack it first".to_owned();
    }
    let text = line.chars().filter(|char| char.is_ascii_graphic() || char.is_alphanumeric() || *char == ' ').count();
    if text > 0 && line.chars().count() - text <= text / 8 {
        format!("text that begins with {:?}", one_line(line.trim(), 40))
    } else {
        "data of another kind".into()
    }
}

/// Advice that the file's name suggests.
fn hint(path: &Path) -> &'static str {
    let name = path.to_string_lossy().to_ascii_lowercase();
    match without_suffix(&name, &PACKED).rsplit('.').next() {
        Some("pickle" | "pkl") => "; a pickle must be of protocol 2 or newer",
        Some("csv") => "; an RMM log begins with Thread,Time,Action,Pointer,Size,Stream",
        Some("json") => "; JSON must start with { or [",
        Some("trace") => "; a trace's lines start with #, a, f, r or i",
        _ => "",
    }
}

const PACKED: [&str; 1] = [".gz"];
const FORMATS: [&str; 5] = [".trace", ".pickle", ".pkl", ".json", ".csv"];

fn without_suffix<'a>(name: &'a str, suffixes: &[&str]) -> &'a str {
    let short = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
    short.filter(|short| !short.is_empty()).unwrap_or(name)
}

/// The file's name without the suffixes of formats.
pub(super) fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    without_suffix(without_suffix(&name, &PACKED), &FORMATS).to_owned()
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
        assert_eq!(tell(b"Time,Action,Pointer,Size,Stream\n"), None);
        assert_eq!(tell(b"PK\x03\x04"), None);
        assert_eq!(tell(b"\n<!DOCTYPE html>"), None);
        assert_eq!(tell(b"all is well\n"), None);
        assert_eq!(tell(b""), None);
    }

    #[test]
    fn other_data_is_named() {
        for (start, what) in [
            (&b"7z\xbc\xaf\0"[..], "a 7-Zip archive; unpack it first"),
            (b"\x28\xb5\x2f\xfd\0", "data that zstd compressed; unpack it first"),
            (b"<!DOCTYPE html>", "a page; give the snapshot that it shows"),
            (b"\xff\xfe{\0", "text in UTF-16, not in UTF-8"),
            (b"SQLite format 3\0", "an SQLite database"),
            (&[&[b'n'; 257][..], b"ustar\0"].concat(), "a tar archive; unpack it first"),
            (b"\x01\x02\xfd", "data of another kind"),
        ] {
            assert_eq!(found(start, std::str::from_utf8(start).unwrap_or_default()), what);
        }
    }

    #[test]
    fn text_may_begin_with_a_byte_order_mark() {
        let mut text = String::new();
        let (format, mut content) = open("x".as_ref(), Box::new("\u{feff}# k: v\n".as_bytes())).ok().unwrap();
        content.read_to_string(&mut text).unwrap();
        assert_eq!((format, &*text), (Format::Trace, "# k: v\n"));
    }

    #[test]
    fn names_lose_their_suffixes() {
        for (path, name) in [
            ("a/gpt.trace.gz", "gpt"),
            ("s.pickle", "s"),
            ("log.csv", "log"),
            ("t.csv.gz", "t"),
            (".gz", ".gz"),
            ("", ""),
        ] {
            assert_eq!(stem(path.as_ref()), name);
        }
    }
}
