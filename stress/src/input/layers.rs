//! Unpacks what is compressed with gzip, xz or zstd, several times over if need be.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Cursor, Read};

use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::allowance::Allowance;
use super::error::{Damage, Fault, LAYERS_MAX, Reason};
use super::gzip::Members;

/// The most memory for what was unpacked and may be referred to. xz takes 64 MiB for its highest
/// level, zstd 128 MiB with `--long`.
const WINDOW: u64 = 128 << 20;

/// Bytes that may be unpacked.
pub(super) type Content<'a> = Box<dyn Read + 'a>;

/// The content below all compression, and how many layers lie around it, with `layers` of them
/// around what is given.
pub(super) fn open<'a>(
    mut content: Content<'a>,
    mut layers: u32,
    allowance: &Allowance,
) -> Result<(Content<'a>, u32), Fault> {
    loop {
        let start = head(&mut content, 6)?;
        let unpack: fn(Content<'a>) -> Content<'a> = match *start {
            [0x1f, 0x8b, ..] => |content| Box::new(Members::new(content)),
            [0xfd, b'7', b'z', b'X', b'Z', 0] => |content| {
                let limit = u32::try_from(WINDOW >> 10).unwrap_or(u32::MAX);
                Box::new(Decoder::new("xz", XzReader::new_mem_limit(BufReader::new(content), true, limit)))
            },
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                |content| Box::new(Decoder::new("zstd", Frames::new(BufReader::new(content))))
            }
            _ => return Ok((Box::new(Cursor::new(start).chain(content)), layers)),
        };
        layers += 1;
        if layers > LAYERS_MAX {
            return Err(Fault::file(Reason::TooManyLayers));
        }
        content = Box::new(allowance.unpacked(unpack(Box::new(Cursor::new(start).chain(content)))));
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

/// A decoder of a library, whose errors are told as damage of the file, and which is not asked
/// again after one.
struct Decoder<R> {
    what: &'static str,
    inner: R,
    damage: Option<Damage>,
}

impl<R: Read> Decoder<R> {
    fn new(what: &'static str, inner: R) -> Self {
        Self { what, inner, damage: None }
    }
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(damage) = &self.damage {
            return Err(damage.clone().into());
        }
        let error = match self.inner.read(into) {
            Ok(count) => return Ok(count),
            Err(error) => Damage::broken(self.what, error),
        };
        self.damage = error.get_ref().and_then(|inner| inner.downcast_ref::<Damage>()).cloned();
        Err(error)
    }
}

/// Frames of zstd data, one after the other.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// A frame was begun, and not all of it was given out.
    inside: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW);
        Self { source, decoder, inside: false }
    }

    /// Begins the next frame, past those to skip. `false` at the end.
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
                Err(error) => return Err(plain(error)),
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
                self.decoder.decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1)).map_err(plain)?;
                continue;
            }
            let sums = self.decoder.get_checksum_from_data().zip(self.decoder.get_calculated_checksum());
            if sums.is_some_and(|(told, is)| told != is) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum is another"));
            }
            self.inside = false;
        }
        Ok(0)
    }
}

/// An error of the decoder, or that of its source which lies in it.
fn plain(error: FrameDecoderError) -> io::Error {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(at) = cause {
        if let Some(source) = at.downcast_ref::<io::Error>() {
            if let Some(damage) = source.get_ref().and_then(|inner| inner.downcast_ref::<Damage>()) {
                return damage.clone().into();
            }
            if let Some(code) = source.raw_os_error() {
                return io::Error::from_raw_os_error(code);
            }
        }
        cause = at.source();
    }
    io::Error::other(error.to_string())
}
