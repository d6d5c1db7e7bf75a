//! Forwards calls of a driver to another one. This is the one list of the signatures for all
//! drivers that decorate one.

/// Implements methods of [`Driver`](crate::Driver) for a driver in front of another one, in its
/// `impl`: `forward_calls! { alloc free … }`. Write the methods that behave differently by hand
/// next to it.
///
/// The driver has two methods of its own. `below(&self) -> &dyn Driver` returns the driver that it
/// forwards to. `call<T>(&self, operation: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>)
/// -> Result<T>` makes a call there, and anything that comes before and after it. Methods that make
/// no driver call use `below`. The types of the signatures must be in scope.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_calls {
    ($($method:ident)*) => { $($crate::forward_calls! { @$method })* };

    (@info) => { fn info(&self) -> &DeviceInfo { self.below().info() } };
    (@as_any) => { fn as_any(&self) -> Option<&dyn Any> { self.below().as_any() } };
    (@capturing_streams) => {
        fn capturing_streams(&self) -> Arc<CapturingStreams> {
            self.below().capturing_streams()
        }
    };
    (@memory_users) => { fn memory_users(&self) -> MemoryUsers { self.below().memory_users() } };
    (@adopt_stream) => {
        unsafe fn adopt_stream(&self, stream: RawStream) {
            // SAFETY: the caller's promise is passed on unchanged.
            unsafe { self.below().adopt_stream(stream) }
        }
    };
    (@release_stream) => { fn release_stream(&self, stream: RawStream) { self.below().release_stream(stream); } };
    (@host_access) => {
        fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
            self.below().host_access(ptr, bytes, kind)
        }
    };
    (@witness) => {
        fn witness(&self) -> Option<Arc<dyn Witness>> { self.below().witness() }
    };
    (@take_violation) => { fn take_violation(&self) -> Option<String> { self.below().take_violation() } };

    (@memory_info) => { $crate::forward_calls! { #MemoryInfo memory_info() -> MemoryInfo } };
    (@attribute) => { $crate::forward_calls! { #Attribute attribute(attribute: Attribute) -> u64 } };
    (@alloc) => { $crate::forward_calls! { #Alloc alloc(bytes: u64) -> DevicePtr } };
    (@free) => { $crate::forward_calls! { #Free free(ptr: DevicePtr) -> () } };
    (@alloc_async) => {
        $crate::forward_calls! { #AllocAsync alloc_async(bytes: u64, stream: RawStream) -> DevicePtr }
    };
    (@free_async) => { $crate::forward_calls! { #FreeAsync free_async(ptr: DevicePtr, stream: RawStream) -> () } };
    (@reserve) => { $crate::forward_calls! { #Reserve reserve(bytes: u64, alignment: u64) -> DevicePtr } };
    (@unreserve) => { $crate::forward_calls! { #Unreserve unreserve(ptr: DevicePtr, bytes: u64) -> () } };
    (@create_physical) => {
        $crate::forward_calls! { #CreatePhysical create_physical(bytes: u64, options: PhysicalOptions) -> RawPhysical }
    };
    (@release_physical) => {
        $crate::forward_calls! { #ReleasePhysical release_physical(physical: RawPhysical) -> () }
    };
    (@map) => { $crate::forward_calls! { #Map map(ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> () } };
    (@unmap) => { $crate::forward_calls! { #Unmap unmap(ptr: DevicePtr, bytes: u64) -> () } };
    (@set_access) => {
        $crate::forward_calls! { #SetAccess set_access(ptr: DevicePtr, bytes: u64, devices: &[u32]) -> () }
    };
    (@host_alloc) => { $crate::forward_calls! { #HostAlloc host_alloc(bytes: usize) -> HostPtr } };
    (@create_stream) => { $crate::forward_calls! { #CreateStream create_stream(flags: StreamFlags) -> RawStream } };
    (@destroy_stream) => { $crate::forward_calls! { #DestroyStream destroy_stream(stream: RawStream) -> () } };
    (@synchronize_stream) => {
        $crate::forward_calls! { #SynchronizeStream synchronize_stream(stream: RawStream) -> () }
    };
    (@query_stream) => { $crate::forward_calls! { #QueryStream query_stream(stream: RawStream) -> bool } };
    (@create_event) => { $crate::forward_calls! { #CreateEvent create_event(timing: bool) -> RawEvent } };
    (@destroy_event) => { $crate::forward_calls! { #DestroyEvent destroy_event(event: RawEvent) -> () } };
    (@record) => { $crate::forward_calls! { #Record record(event: RawEvent, stream: RawStream) -> () } };
    (@wait) => { $crate::forward_calls! { #Wait wait(stream: RawStream, event: RawEvent) -> () } };
    (@wait_peer) => {
        $crate::forward_calls! { #Wait wait_peer(stream: RawStream, peer: &dyn Driver, event: RawEvent) -> () }
    };
    (@query_event) => { $crate::forward_calls! { #QueryEvent query_event(event: RawEvent) -> bool } };
    (@synchronize_event) => { $crate::forward_calls! { #SynchronizeEvent synchronize_event(event: RawEvent) -> () } };
    (@elapsed_ms) => { $crate::forward_calls! { #ElapsedTime elapsed_ms(start: RawEvent, end: RawEvent) -> f64 } };
    (@synchronize) => { $crate::forward_calls! { #Synchronize synchronize() -> () } };
    (@copy_on_device) => {
        $crate::forward_calls! {
            #CopyOnDevice copy_on_device(dst: DevicePtr, src: DevicePtr, bytes: u64,
                stream: RawStream) -> ()
        }
    };
    (@copy_peer) => {
        $crate::forward_calls! {
            #CopyPeer copy_peer(dst: DevicePtr, peer: &dyn Driver, src: DevicePtr, bytes: u64,
                stream: RawStream) -> ()
        }
    };
    (@memset) => {
        $crate::forward_calls! { #Memset memset(ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> () }
    };
    (@load_module) => { $crate::forward_calls! { #LoadModule load_module(ptx: &str) -> RawModule } };
    (@unload_module) => { $crate::forward_calls! { #UnloadModule unload_module(module: RawModule) -> () } };
    (@begin_capture) => { $crate::forward_calls! { #BeginCapture begin_capture(stream: RawStream) -> () } };
    (@capture_status) => {
        $crate::forward_calls! { #CaptureStatus capture_status(stream: RawStream) -> CaptureStatus }
    };
    (@capture_number) => {
        $crate::forward_calls! { #CaptureStatus capture_number(stream: RawStream) -> Option<u64> }
    };
    (@keep_for_graph) => {
        $crate::forward_calls! { #CaptureStatus keep_for_graph(stream: RawStream, what: Arc<dyn Any + Send + Sync>) -> () }
    };
    (@take_kept) => { fn take_kept(&self) -> Vec<Arc<dyn Any + Send + Sync>> { self.below().take_kept() } };
    (@end_capture) => { $crate::forward_calls! { #EndCapture end_capture(stream: RawStream) -> RawGraph } };
    (@launch_graph) => {
        $crate::forward_calls! { #LaunchGraph launch_graph(graph: RawGraph, stream: RawStream) -> () }
    };
    (@destroy_graph) => { $crate::forward_calls! { #DestroyGraph destroy_graph(graph: RawGraph) -> () } };
    (@stream_id) => { $crate::forward_calls! { #StreamId stream_id(stream: RawStream) -> Option<u64> } };
    (@pool_usage) => { $crate::forward_calls! { #PoolUsage pool_usage() -> PoolUsage } };
    (@trim_pool) => { $crate::forward_calls! { #TrimPool trim_pool(keep: u64) -> () } };
    (@trim_graph_memory) => { $crate::forward_calls! { #TrimGraphMemory trim_graph_memory() -> () } };
    (@can_access_peer) => { $crate::forward_calls! { #CanAccessPeer can_access_peer(peer: u32) -> bool } };

    (@copy_to_device) => {
        $crate::forward_calls! {
            #CopyToDevice unsafe copy_to_device(dst: DevicePtr, src: *const u8, bytes: usize,
                stream: RawStream) -> ()
        }
    };
    (@copy_to_host) => {
        $crate::forward_calls! {
            #CopyToHost unsafe copy_to_host(dst: *mut u8, src: DevicePtr, bytes: usize,
                stream: RawStream) -> ()
        }
    };
    (@host_register) => {
        $crate::forward_calls! { #HostRegister unsafe host_register(ptr: *mut u8, bytes: usize) -> HostPtr }
    };
    (@host_free) => { $crate::forward_calls! { #HostFree unsafe host_free(ptr: HostPtr) -> () } };
    (@host_unregister) => { $crate::forward_calls! { #HostUnregister unsafe host_unregister(ptr: HostPtr) -> () } };
    (@copy_2d) => { $crate::forward_calls! { #Copy2d unsafe copy_2d(copy: &Copy2d, stream: RawStream) -> () } };
    (@copy_batch) => {
        $crate::forward_calls! { #CopyBatch unsafe copy_batch(copies: &[CopyPart], stream: RawStream) -> () }
    };
    (@launch) => { $crate::forward_calls! { #Launch unsafe launch(launch: &Launch, stream: RawStream) -> () } };

    (#$operation:ident $method:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        fn $method(&self, $($arg: $type),*) -> Result<$result> {
            self.call(Operation::$operation, |below| below.$method($($arg),*))
        }
    };
    (#$operation:ident unsafe $method:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        unsafe fn $method(&self, $($arg: $type),*) -> Result<$result> {
            // SAFETY: the caller's promise is passed on unchanged.
            self.call(Operation::$operation, |below| unsafe { below.$method($($arg),*) })
        }
    };
}
