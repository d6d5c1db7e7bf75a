//! Unpacks content that gzip compressed.

use std::io::{self, BufReader, Cursor, ErrorKind, Read};

use flate2::bufread::MultiGzDecoder;

use super::allowance::Allowance;
use super::error::{Fault, Reason};

/// Bytes that may be unpacked.
pub(super) type Content<'a> = Box<dyn Read + 'a>;

/// The content below the compression.
pub(super) fn open<'a>(mut content: Content<'a>, allowance: &Allowance) -> Result<Content<'a>, Fault> {
    let start = head(&mut content, 2)?;
    let is_packed = start == [0x1f, 0x8b];
    let content = Cursor::new(start).chain(content);
    if !is_packed {
        return Ok(Box::new(content));
    }
    Ok(Box::new(allowance.unpacked(Unpacked(MultiGzDecoder::new(BufReader::new(content))))))
}

/// The first bytes, up to `most`.
pub(super) fn head(content: &mut impl Read, most: u64) -> Result<Vec<u8>, Fault> {
    let mut head = Vec::new();
    match content.by_ref().take(most).read_to_end(&mut head) {
        Ok(_) => Ok(head),
        Err(error) => Err(Fault::file(Reason::from_read(error))),
    }
}

/// A decoder, whose own errors become errors of the file. Errors of its source stay as they are.
struct Unpacked<R>(R);

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => Reason::Truncated("gzip").into(),
            ErrorKind::InvalidInput | ErrorKind::InvalidData
                if !error.get_ref().is_some_and(|own| own.is::<Reason>()) =>
            {
                Reason::Damaged { what: "gzip", why: error.to_string() }.into()
            }
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn compressed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn decompressed(bytes: &[u8]) -> Result<Vec<u8>, Reason> {
        let mut text = Vec::new();
        let mut content = open(Box::new(bytes), &Allowance::default()).map_err(|fault| fault.reason)?;
        content.read_to_end(&mut text).map(|_| text).map_err(Reason::from_read)
    }

    #[test]
    fn gzip_members_follow_one_another() {
        let (one, two) = (compressed(b"one "), compressed(b"two"));
        assert_eq!(decompressed(&[one, two].concat()).unwrap(), b"one two");
    }

    #[test]
    fn incomplete_gzip_data_and_bytes_after_it_are_errors() {
        let whole = compressed(&[7; 1000]);
        for cut in 2..whole.len() {
            assert!(matches!(decompressed(&whole[..cut]), Err(Reason::Truncated("gzip"))), "{cut}");
        }
        for follows in [&b"x"[..], &[0; 100], b"a 0 1 0\n"] {
            let error = decompressed(&[&whole[..], follows].concat()).unwrap_err();
            assert!(matches!(error, Reason::Truncated(_) | Reason::Damaged { what: "gzip", .. }), "{error}");
        }
    }
}
