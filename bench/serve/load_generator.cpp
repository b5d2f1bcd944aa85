// A client that costs a server's machine little: N keep-alive connections on one thread, each with one request under way.
//
//     load_generator PORT REQUESTS CLIENTS WARM_SECONDS SECONDS
//
// REQUESTS: a file of requests, each behind its length (u32, little-endian), sent in turn. Answers that begin in the
// first WARM_SECONDS are not counted. Prints one line of JSON: counts by status, rate of the 200s, their latencies.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "load_generator: %s\n", what.c_str());
    std::exit(1);
}

double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

std::vector<std::string> read_requests(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<std::string> requests;
    for (std::uint32_t size; file.read(reinterpret_cast<char*>(&size), 4);) {
        std::string request(size, '\0');
        if (!file.read(request.data(), size)) fail("the file of requests is cut short");
        requests.push_back(std::move(request));
    }
    if (requests.empty()) fail("no requests");
    return requests;
}

// The value of a header, lower case, or "".
std::string header(const std::string& head, const char* name) {
    std::string lower(head);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    const auto at = lower.find(std::string("\r\n") + name + ":");
    if (at == std::string::npos) return "";
    auto from = at + std::strlen(name) + 3;
    while (from < lower.size() && lower[from] == ' ') ++from;
    return lower.substr(from, lower.find("\r\n", from) - from);
}

struct Connection {
    int socket = -1;
    std::string in;
    std::size_t body = 0, length = 0;  // where the body begins, 0 while its head is incomplete; bytes of it
    bool chunked = false, closes = false;
    Clock::time_point began;

    // Whether a whole answer has come.
    bool complete() {
        if (body == 0) {
            const auto end = in.find("\r\n\r\n");
            if (end == std::string::npos) return false;
            const std::string head = in.substr(0, end + 2);
            body = end + 4;
            chunked = header(head, "transfer-encoding") == "chunked";
            closes = header(head, "connection") == "close";
            const auto text = header(head, "content-length");
            if (text.empty() && !chunked) fail("an answer without length");
            length = text.empty() ? 0 : std::stoul(text);
        }
        if (!chunked) return in.size() >= body + length;
        for (std::size_t at = body;;) {
            const auto line = in.find("\r\n", at);
            if (line == std::string::npos) return false;
            const auto size = std::stoul(in.substr(at, line - at), nullptr, 16);
            at = line + 2 + size + 2;
            if (at > in.size()) return false;
            if (size == 0) return true;
        }
    }

    void reset() {
        in.clear();
        body = length = 0;
    }
};

int connected(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int made = ::socket(AF_INET, SOCK_STREAM, 0), one = 1;
    ::setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (::connect(made, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail(std::strerror(errno));
    return made;
}

}  // namespace

int main(int count, char** values) {
    if (count != 6) fail("expected PORT REQUESTS CLIENTS WARM_SECONDS SECONDS");
    const int port = std::atoi(values[1]), clients = std::atoi(values[3]);
    const auto requests = read_requests(values[2]);
    const double warm = std::atof(values[4]), whole = warm + std::atof(values[5]);

    const int poll = ::epoll_create1(0);
    std::vector<Connection> connections(static_cast<std::size_t>(clients));
    std::size_t next = 0;
    const auto ask = [&](Connection& one) {
        const std::string& request = requests[next++ % requests.size()];
        one.reset();
        one.began = Clock::now();
        std::size_t sent = 0;  // on a blocking socket: requests are far smaller than its buffer
        while (sent < request.size()) {
            const auto step = ::send(one.socket, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
            if (step <= 0) fail(std::string("send: ") + std::strerror(errno));
            sent += static_cast<std::size_t>(step);
        }
    };
    const auto open = [&](Connection& one) {
        one.socket = connected(port);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = &one;
        ::epoll_ctl(poll, EPOLL_CTL_ADD, one.socket, &event);
        ask(one);
    };

    const auto start = Clock::now();
    for (auto& one : connections) open(one);
    std::vector<double> latencies;
    std::map<std::string, long> statuses;
    std::vector<char> piece(1 << 16);
    epoll_event events[256];
    double now = 0;
    while (now < whole) {
        const int ready = ::epoll_wait(poll, events, 256, 1000);
        now = seconds(start, Clock::now());
        if (now > whole + 30) fail("no answers");
        for (int i = 0; i < ready; ++i) {
            auto& one = *static_cast<Connection*>(events[i].data.ptr);
            const auto got = ::recv(one.socket, piece.data(), piece.size(), MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (got <= 0) fail("the server hung up");
            one.in.append(piece.data(), static_cast<std::size_t>(got));
            if (!one.complete()) continue;
            const auto end = Clock::now();
            if (seconds(start, end) > warm && seconds(start, end) <= whole) {
                const std::string status = one.in.substr(9, 3);
                ++statuses[status];
                if (status == "200") latencies.push_back(1e3 * seconds(one.began, end));
            }
            if (one.closes) {
                ::close(one.socket);
                open(one);
            } else {
                ask(one);
            }
        }
    }
    std::sort(latencies.begin(), latencies.end());
    const auto at = [&](double share) {
        if (latencies.empty()) return 0.0;
        return latencies[std::min(latencies.size() - 1, static_cast<std::size_t>(share * double(latencies.size())))];
    };
    std::printf("{\"rate\": %.3f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"statuses\": {", double(latencies.size()) / (whole - warm),
                at(0.5), at(0.99));
    const char* comma = "";
    for (const auto& [status, number] : statuses) {
        std::printf("%s\"%s\": %ld", comma, status.c_str(), number);
        comma = ", ";
    }
    std::printf("}}\n");
}
