//! Files straight to the device, through the staging ring.

use std::path::Path;
use std::sync::Arc;

use aquifer_allocator::DeviceBuffer;
use aquifer_device::Stream;

use crate::error::TransferError;
use crate::pending::Pending;
use crate::runtime::Transfer;
use crate::staging::{FileReport, FileSource};

impl Transfer {
    /// Fills device memory from a file, from `offset` on, as many bytes as the memory has. Threads of the staging ring read the file at
    /// several places at a time, ahead of the copies. What was read, and whether storage was what limited it, is in the report.
    ///
    /// Whoever uses `to` next, on any stream, comes after all of it, and waits on the host while the file is being read.
    ///
    /// # Errors
    /// A file that is not there, cannot be read, or is too short; memory of another device, a stream that captures, and those of the
    /// driver. What goes wrong while the file is read is the pending transfer's.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::Transfer;
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let stream = device.stream()?;
    /// let path = std::env::temp_dir().join(format!("aquifer-file-example-{}", std::process::id()));
    /// std::fs::write(&path, [1, 2, 3, 4, 5])?;
    /// let mut buffer: DeviceBuffer<u8> = transfer.allocator().alloc_buffer(3, &stream)?;
    /// let report = transfer.read_file_to_device(&path, 1, &mut buffer)?.wait()?;
    /// assert_eq!((report.bytes, transfer.to_vec(&buffer)?.wait()?), (3, vec![2, 3, 4]));
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn read_file_to_device(
        &self,
        path: impl AsRef<Path>,
        offset: u64,
        to: &mut DeviceBuffer<u8>,
    ) -> Result<Pending<FileReport>, TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", to.storage().device_id())?;
        let source = self.part_of_file(path.as_ref(), offset, to.bytes())?;
        self.upload_file(source, to)
    }

    fn part_of_file(&self, path: &Path, offset: u64, bytes: u64) -> Result<FileSource, TransferError> {
        FileSource::open(path, offset, bytes, self.staging().config().direct_io)
    }

    fn upload_file(&self, source: FileSource, to: &mut DeviceBuffer<u8>) -> Result<Pending<FileReport>, TransferError> {
        let progress = source.progress().clone();
        let (_, pending) = self.stage_upload(Arc::new(source), to)?;
        Ok(pending.map(move |()| progress.report()))
    }

    /// Allocates device memory for `stream` and fills it from a part of a file; see [`Transfer::read_file_to_device`].
    ///
    /// # Errors
    /// As [`Transfer::read_file_to_device`], and when device memory runs out. The file is looked at first.
    #[track_caller]
    pub fn file_to_device(
        &self,
        path: impl AsRef<Path>,
        offset: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<Pending<(DeviceBuffer<u8>, FileReport)>, TransferError> {
        let _place = self.called_here();
        self.check_stream(stream)?;
        let source = self.part_of_file(path.as_ref(), offset, bytes)?;
        let mut buffer = self.allocator().alloc_buffer(bytes, stream)?;
        Ok(self.upload_file(source, &mut buffer)?.map(move |report| (buffer, report)))
    }
}
