//! Unpacks content that is compressed with gzip, xz or zstd, in several layers if need be.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::allowance::{Allowance, VALUES};
use super::error::{Fault, LAYERS_MAX, Reason};

/// The most memory for unpacked data that later data may refer to. xz takes 64 MiB for its highest
/// level, zstd 128 MiB with `--long`.
const WINDOW: u64 = 128 << 20;

/// The longest content that is held in memory: an archive or a page.
const LONGEST: u64 = 4 << 30;

/// Bytes that may be unpacked.
pub(super) type Content<'a> = Box<dyn Read + 'a>;

/// The content below all compression, and the number of layers around it, including the `layers`
/// around the given content.
pub(super) fn open<'a>(
    mut content: Content<'a>,
    mut layers: u32,
    allowance: &Allowance,
) -> Result<(Content<'a>, u32), Fault> {
    loop {
        let start = head(&mut content, 6)?;
        let (what, decode): (&str, fn(Source<'a>) -> Content<'a>) = match *start {
            [0x1f, 0x8b, ..] => ("gzip", |source| Box::new(MultiGzDecoder::new(source))),
            [0xfd, b'7', b'z', b'X', b'Z', 0] => ("xz", |source| {
                let limit = u32::try_from(WINDOW >> 10).unwrap_or(u32::MAX);
                Box::new(XzReader::new_mem_limit(source, true, limit))
            }),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                ("zstd", |source| Box::new(Frames::new(source)))
            }
            _ => return Ok((Box::new(Cursor::new(start).chain(content)), layers)),
        };
        layers += 1;
        if layers > LAYERS_MAX {
            return Err(Fault::file(Reason::TooManyLayers));
        }
        let failed = Rc::<Cell<_>>::default();
        let source = Recorded { inner: Box::new(Cursor::new(start).chain(content)), failed: failed.clone() };
        let inner = decode(BufReader::new(source));
        content = Box::new(allowance.unpacked(Decoder { what, inner, source_failed: failed }));
    }
}

/// The first bytes, up to `most`.
pub(super) fn head(content: &mut impl Read, most: u64) -> Result<Vec<u8>, Fault> {
    let mut head = Vec::new();
    match content.by_ref().take(most).read_to_end(&mut head) {
        Ok(_) => Ok(head),
        Err(error) => Err(Fault::file(Reason::from_read(error))),
    }
}

/// All bytes, within the allowance.
pub(super) fn whole(content: Content<'_>, allowance: &Allowance) -> Result<Vec<u8>, Fault> {
    let mut content = BufReader::with_capacity(64 << 10, allowance.content(content));
    let mut bytes = Vec::new();
    loop {
        let part = content.fill_buf().map_err(|error| Fault::file(Reason::from_read(error)))?;
        let length = part.len();
        if length == 0 {
            return Ok(bytes);
        }
        bytes.try_reserve(length).map_err(|error| Fault::file(error.into()))?;
        bytes.extend_from_slice(part);
        content.consume(length);
        if bytes.len() as u64 > LONGEST {
            return Err(Fault::file(Reason::TooLong { most: LONGEST }));
        }
        allowance.check(bytes.len(), VALUES).map_err(Fault::file)?;
    }
}

/// The input of a decoder.
type Source<'a> = BufReader<Recorded<'a>>;

/// Keeps the error of a read. A decoder passes on no more than its text.
struct Recorded<'a> {
    inner: Content<'a>,
    failed: Rc<Cell<Option<io::Error>>>,
}

impl Read for Recorded<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.inner.read(into).map_err(|error| {
            let kind = error.kind();
            self.failed.set(Some(error));
            kind.into()
        })
    }
}

/// A decoder, whose own errors become errors of the file. Errors of its source stay as they are.
pub(super) struct Decoder<'a> {
    what: &'static str,
    inner: Content<'a>,
    source_failed: Rc<Cell<Option<io::Error>>>,
}

impl<'a> Decoder<'a> {
    /// A decoder of data in memory.
    pub(super) fn in_memory(what: &'static str, inner: impl Read + 'a) -> Self {
        Self { what, inner: Box::new(inner), source_failed: Rc::default() }
    }
}

impl Read for Decoder<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Forget an error that the decoder has recovered from.
        self.source_failed.take();
        self.inner.read(into).map_err(|error| match self.source_failed.take() {
            Some(error) => error,
            None if error.kind() == io::ErrorKind::UnexpectedEof => Reason::Truncated(self.what).into(),
            None => Reason::Damaged { what: self.what, why: error.to_string() }.into(),
        })
    }
}

/// Frames of zstd data, one after the other.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// A frame has begun, and some of it was not read yet.
    inside: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW);
        Self { source, decoder, inside: false }
    }

    /// Begins the next frame, after frames that are to be skipped. `false` at the end.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut self.source.by_ref().take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !into.is_empty() {
            if !self.inside && !self.begin()? {
                break;
            }
            self.inside = true;
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(into);
            }
            if !self.decoder.is_finished() {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, blocks).map_err(io::Error::other)?;
                continue;
            }
            let sums = self.decoder.get_checksum_from_data().zip(self.decoder.get_calculated_checksum());
            if sums.is_some_and(|(stored, calculated)| stored != calculated) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum differs"));
            }
            self.inside = false;
        }
        Ok(0)
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
        let (mut content, _) = open(Box::new(bytes), 0, &Allowance::default()).map_err(|fault| fault.reason)?;
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
