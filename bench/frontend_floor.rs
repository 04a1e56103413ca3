//! The floor under the front end benchmark without Python: one thread, epoll, one send(2) a token.
//!
//! Started by bench/frontend_floor.py, which prepares every byte and passes the engine's socket as
//! the file descriptor named by the first argument. On stdin: rounds, each u32 length and that many
//! bytes, as `native_round` of frontend_floor.py packs them. On stdout: the port, then a line for
//! every round that is ready. Integers are little-endian.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(not(target_arch = "x86_64"), repr(C))]
#[derive(Clone, Copy)]
struct EpollEvent {
    events: u32,
    data: u64,
}

extern "C" {
    fn epoll_create1(flags: i32) -> i32;
    fn epoll_ctl(epoll: i32, operation: i32, fd: i32, event: *mut EpollEvent) -> i32;
    fn epoll_wait(epoll: i32, events: *mut EpollEvent, most: i32, timeout_ms: i32) -> i32;
}

const EPOLLIN: u32 = 1;
const EPOLLOUT: u32 = 4;
const ADD: i32 = 1;
const MODIFY: i32 = 3;
const HEALTHY: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

fn watch(epoll: i32, operation: i32, fd: RawFd, events: u32) {
    let mut event = EpollEvent { events, data: fd as u64 };
    assert_eq!(unsafe { epoll_ctl(epoll, operation, fd, &mut event) }, 0, "epoll_ctl");
}

fn u32_at(data: &[u8], at: usize) -> usize {
    u32::from_le_bytes(data[at..at + 4].try_into().unwrap()) as usize
}

/// What one stream writes: before its first token, around each, and after its last.
struct Frames {
    opening: Vec<u8>,
    before: Vec<u8>,
    after: Vec<u8>,
    closing: Vec<u8>,
}

#[derive(Default)]
struct Round {
    output_tokens: usize,
    texts: Vec<Vec<u8>>,
    streams: Vec<Frames>,
}

impl Round {
    fn parse(data: &[u8]) -> Round {
        let mut at = 12;
        let mut next = || {
            let end = at + 4 + u32_at(data, at);
            let bytes = data[at + 4..end].to_vec();
            at = end;
            bytes
        };
        let texts = (0..u32_at(data, 8)).map(|_| next()).collect();
        let streams = (0..u32_at(data, 0))
            .map(|_| Frames { opening: next(), before: next(), after: next(), closing: next() })
            .collect();
        Round { output_tokens: u32_at(data, 4), texts, streams }
    }

    fn spell(&self, stream: usize, token_idx: usize, into: &mut Vec<u8>) {
        let frames = &self.streams[stream];
        into.clear();
        if token_idx == 0 {
            into.extend_from_slice(&frames.opening);
        }
        into.extend_from_slice(&frames.before);
        into.extend_from_slice(&self.texts[(stream + token_idx) % self.texts.len()]);
        into.extend_from_slice(&frames.after);
        if token_idx + 1 == self.output_tokens {
            into.extend_from_slice(&frames.closing);
        }
    }
}

/// A client's connection. `unsent`: what its socket did not take; leaves when it can.
struct Connection {
    socket: TcpStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

impl Connection {
    fn send(&mut self, epoll: i32, data: &[u8]) {
        let mut sent = 0;
        if self.unsent.is_empty() {
            match self.socket.write(data) {
                Ok(count) => sent = count,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            if sent < data.len() {
                watch(epoll, MODIFY, self.socket.as_raw_fd(), EPOLLIN | EPOLLOUT);
            }
        }
        self.unsent.extend_from_slice(&data[sent..]);
    }

    fn send_rest(&mut self, epoll: i32) {
        if let Ok(count) = self.socket.write(&self.unsent) {
            self.unsent.drain(..count);
        }
        if self.unsent.is_empty() {
            watch(epoll, MODIFY, self.socket.as_raw_fd(), EPOLLIN);
        }
    }

    /// The body of a request once it is whole; None before. The connection may be gone: Err.
    fn request(&mut self) -> Result<Option<Vec<u8>>, ()> {
        let mut buffer = [0u8; 4096];
        match self.socket.read(&mut buffer) {
            Ok(0) => return Err(()),
            Ok(count) => self.received.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            Err(_) => return Err(()),
        }
        let text = String::from_utf8_lossy(&self.received);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return Ok(None) };
        let declared = head.split("Content-Length: ").nth(1).map_or(0, |rest| {
            rest.split("\r\n").next().unwrap_or("0").trim().parse().expect("a length")
        });
        if body.len() < declared {
            return Ok(None);
        }
        let body = body.as_bytes().to_vec();
        self.received.clear();
        Ok(Some(body))
    }
}

fn stream_of(body: &[u8]) -> usize {
    let text = std::str::from_utf8(body).expect("JSON");
    let name = text.split("\"rid\":\"s-").nth(1).expect("a request id");
    name.split('"').next().unwrap_or("").parse().expect("a stream number")
}

struct Floor {
    epoll: i32,
    round: Round,
    engine: UnixStream,
    told: Vec<u8>,
    connections: HashMap<RawFd, Connection>,
    carrier: Vec<RawFd>, // by stream
    data: Vec<u8>,
}

impl Floor {
    fn begin(&mut self, blob: &[u8]) {
        self.round = Round::parse(blob);
        self.carrier = vec![-1; self.round.streams.len()];
    }

    fn accept(&mut self, listener: &TcpListener) {
        while let Ok((socket, _)) = listener.accept() {
            socket.set_nonblocking(true).unwrap();
            socket.set_nodelay(true).unwrap();
            let fd = socket.as_raw_fd();
            watch(self.epoll, ADD, fd, EPOLLIN);
            let connection = Connection { socket, received: Vec::new(), unsent: Vec::new() };
            self.connections.insert(fd, connection);
        }
    }

    fn hear(&mut self, fd: RawFd) {
        let Some(connection) = self.connections.get_mut(&fd) else { return };
        match connection.request() {
            Err(()) => drop(self.connections.remove(&fd)),
            Ok(None) => {}
            Ok(Some(body)) if body.is_empty() => connection.send(self.epoll, HEALTHY),
            Ok(Some(body)) => {
                let stream = stream_of(&body);
                self.carrier[stream] = fd;
                self.engine.write_all(&(stream as i32).to_le_bytes()).unwrap();
            }
        }
    }

    /// Whether the engine is still there.
    fn steps(&mut self) -> bool {
        let mut buffer = [0u8; 1 << 16];
        match self.engine.read(&mut buffer) {
            Ok(0) => return false,
            Ok(count) => self.told.extend_from_slice(&buffer[..count]),
            Err(_) => return true,
        }
        let mut at = 0;
        while self.told.len() >= at + 8 {
            let (token_idx, count) = (u32_at(&self.told, at), u32_at(&self.told, at + 4));
            let end = at + 8 + 4 * count;
            if self.told.len() < end {
                break;
            }
            for place in (at + 8..end).step_by(4) {
                let stream = u32_at(&self.told, place);
                self.round.spell(stream, token_idx, &mut self.data);
                if let Some(connection) = self.connections.get_mut(&self.carrier[stream]) {
                    connection.send(self.epoll, &self.data);
                }
            }
            at = end;
        }
        self.told.drain(..at);
        true
    }
}

fn rounds(to_floor: std::sync::mpsc::Sender<Vec<u8>>, wake: UnixStream) {
    let mut stdin = std::io::stdin().lock();
    let mut length = [0u8; 4];
    while stdin.read_exact(&mut length).is_ok() {
        let mut blob = vec![0u8; u32::from_le_bytes(length) as usize];
        stdin.read_exact(&mut blob).expect("a whole round");
        to_floor.send(blob).unwrap();
        (&wake).write_all(b"r").unwrap();
    }
}

fn main() {
    let engine_fd: RawFd = std::env::args().nth(1).expect("a descriptor").parse().unwrap();
    let engine = unsafe { UnixStream::from_raw_fd(engine_fd) };
    engine.set_nonblocking(false).unwrap(); // epoll says when to read; writes may wait
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (waker, woken) = UnixStream::pair().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || rounds(sender, waker));
    let epoll = unsafe { epoll_create1(0) };
    for fd in [listener.as_raw_fd(), engine_fd, woken.as_raw_fd()] {
        watch(epoll, ADD, fd, EPOLLIN);
    }
    println!("{}", listener.local_addr().unwrap().port());
    let mut floor = Floor {
        epoll,
        round: Round::default(),
        engine,
        told: Vec::new(),
        connections: HashMap::new(),
        carrier: Vec::new(),
        data: Vec::new(),
    };
    let mut events = [EpollEvent { events: 0, data: 0 }; 1024];
    loop {
        let count = unsafe { epoll_wait(epoll, events.as_mut_ptr(), 1024, -1) };
        for event in &events[..count.max(0) as usize] {
            let (fd, what) = (event.data as RawFd, event.events);
            if fd == listener.as_raw_fd() {
                floor.accept(&listener);
            } else if fd == engine_fd {
                if !floor.steps() {
                    return;
                }
            } else if fd == woken.as_raw_fd() {
                if (&woken).read_exact(&mut [0u8; 1]).is_err() {
                    return;
                }
                floor.begin(&receiver.recv().unwrap());
                println!("ready");
            } else {
                if what & EPOLLOUT != 0 {
                    let connection = floor.connections.get_mut(&fd);
                    connection.expect("watched while it is there").send_rest(epoll);
                }
                if what & !EPOLLOUT != 0 {
                    floor.hear(fd);
                }
            }
        }
    }
}
